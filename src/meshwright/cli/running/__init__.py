"""Verbs that compute: train, launch, measure, compress, prepare.

- `compress`: meshwright compress bench, meshwright compress explain
- `launch`: meshwright launch PLAN --on PLACE
- `measure`: meshwright measure
- `prepare`: meshwright prepare INPUT... -o FOLDER
- `train`: meshwright train MODEL
- `training`: job, plan and screen of `train`
- `training_options`: the options of a run, the same for `train` and for `launch`
"""
