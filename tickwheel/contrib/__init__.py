"""Support for frameworks: one module for each, which imports the framework. No other module of
Tickwheel imports these modules."""
