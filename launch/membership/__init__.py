"""This process's cluster and its role in it: TF_CONFIG, Slurm, hosts, ports, roles."""
