"""Launchers that start a run on other machines: a Slurm script, Kubernetes manifests, torchrun or Ray."""
