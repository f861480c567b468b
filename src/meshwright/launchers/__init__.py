"""How does a run start on other machines? A plan becomes a Slurm script, Kubernetes manifests, torchrun or Ray."""
