"""What the tests of more than one folder need: rigs, fakes, real daemons."""
