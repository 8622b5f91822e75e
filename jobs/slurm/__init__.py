"""Jobs on SLURM, through submitit."""
