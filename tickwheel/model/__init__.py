"""Values that all parts share: records, effects, states and retry policies. No I/O."""
