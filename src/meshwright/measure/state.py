"""What has been measured so far, in a file: a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.files import read_json, write_text
from meshwright.errors import InputError
from meshwright.measure.samples import Sample
from meshwright.measure.timing import Timing


@dataclass
class State:
    """Samples by the measurement they belong to, of one machine."""

    path: Path
    machine: dict[str, Any]  # what must be the same for samples to be of use
    done: dict[str, list[Sample]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # of measurements that are uncertain, or not whole

    @staticmethod
    def load(path: Path, machine: dict[str, Any]) -> State:
        """What an earlier run left there, if it was on the same machine."""
        if not path.exists():
            return State(path, machine)
        table = read_json(path)
        if not isinstance(table, dict) or not isinstance(table.get("done"), dict):
            raise InputError("does not hold measurements", file=str(path), valid="delete it to begin anew")
        if table.get("machine") != machine:
            return State(path, machine)
        done = {name: [_sample(row) for row in rows] for name, rows in table["done"].items()}
        return State(path, machine, done, dict(table.get("notes", {})))

    def add(self, name: str, samples: Iterable[Sample], note: str = "") -> None:
        """Keep the samples of a measurement, and what is uncertain about it."""
        self.done[name] = list(samples)
        if note:
            self.notes[name] = note
        rows = {key: [_row(sample) for sample in found] for key, found in self.done.items()}
        table = {"machine": self.machine, "done": rows, "notes": self.notes}
        write_text(self.path, json.dumps(table, indent=1) + "\n")

    def forget(self) -> None:
        """When all is written elsewhere."""
        self.path.unlink(missing_ok=True)


def _row(sample: Sample) -> dict[str, Any]:
    return {"kind": sample.kind, **sample.facts, "seconds": sample.timing.seconds, "spread": sample.timing.spread}


def _sample(row: dict[str, Any]) -> Sample:
    facts = {key: float(value) for key, value in row.items() if key not in {"kind", "seconds", "spread"}}
    return Sample(str(row["kind"]), facts, Timing(float(row["seconds"]), float(row["spread"])))
