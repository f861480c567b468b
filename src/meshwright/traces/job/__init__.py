"""All ranks of a job: who waited for whom, who is slow, what decides the length of a step."""
