"""What all parts share: records, effects, states and retry policies. Values and arithmetic only."""
