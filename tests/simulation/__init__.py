"""The simulation: daemons, their store and their clients in one process, on one event loop whose
time, network and store come from a seed. See docs/durability.md, "Simulation"."""
