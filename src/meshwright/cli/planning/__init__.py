"""Verbs about plans: find, check, show, price, explain and compare them.

- `check`: meshwright check PLAN
- `compare`: meshwright compare A B
- `estimate`: meshwright estimate MODEL CLUSTER --plan PLAN
- `explain`: meshwright explain PLAN
- `plan`: meshwright plan MODEL CLUSTER
- `search_options`: shared parts of the verbs that search
- `show`: meshwright show PLAN
- `sweep`: meshwright sweep MODEL CLUSTER
"""
