"""Which process of which cluster this one is: TF_CONFIG, Slurm, hosts, ports, roles."""
