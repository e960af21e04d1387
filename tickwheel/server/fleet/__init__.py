"""Several daemons that share the work: leases, processes, nodes, and the number of shards."""
