"""All ranks of a job: waiting, stragglers, and the critical path of a step."""
