"""Chain problem as a mixed-integer programme for the HiGHS solver: an independent proof of `chain.py`.

A plan is a path through nodes (layer, stage, strategy). Flow along it is balanced at every node. Without memory and the
slowest stage the relaxation is therefore already integral; only these two couple the path.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.search.refine.chain_paths import Instance

Array = Any


@dataclass(frozen=True)
class MilpSolution:
    """Result of HiGHS, and its proof: no step takes less than `bound`. Nothing found: `value` is inf."""

    value: float
    bound: float
    gap: float  # relative; 0 if the optimum is proven, or that there is none
    seconds: float
    cuts: tuple[int, ...]
    strategies: tuple[int, ...]


def solve_milp(instance: Instance, time_limit: float | None = None, *, below: float = np.inf) -> MilpSolution:
    """Return the least step; with `below` the least at or under it, which is quicker to refute than to improve.

    Constraints hold within one part in 1e9, a wider tolerance than that of `chain.solve`.
    """
    try:
        highspy: Any = import_module("highspy")
    except ImportError as error:
        raise InputError("the MILP solver is not installed", valid="pip install 'meshwright[milp]'") from error
    model = _Model(instance, below)
    solver = highspy.Highs()
    options = {
        "output_flag": False, "threads": 1, "mip_rel_gap": 1e-9, "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9,
    }  # fmt: skip
    for name, option in (options | ({} if time_limit is None else {"time_limit": float(time_limit)})).items():
        solver.setOptionValue(name, option)
    solver.passModel(model.program(highspy))
    start = time.perf_counter()
    solver.run()
    seconds = time.perf_counter() - start
    info, status = solver.getInfo(), solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return MilpSolution(np.inf, below, 0.0, seconds, (), ())
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return MilpSolution(np.inf, max(0.0, info.mip_dual_bound), np.inf, seconds, (), ())
    cuts, strategies = model.plan(np.array(solver.getSolution().col_value))
    value = float(info.objective_function_value)
    return MilpSolution(value, float(info.mip_dual_bound), float(info.mip_gap), seconds, cuts, strategies)


class _Model:
    """Columns and rows; a row is written as (columns, factors, least, most)."""

    def __init__(self, instance: Instance, below: float) -> None:
        self.instance = instance
        self.upper: list[Array] = []
        self.cost: list[Array] = []
        self.columns = 0
        self.rows: list[tuple[Array, Array, float, float]] = []
        layers, stages = len(instance.time), instance.stages
        alike = np.vstack([instance.relayout, instance.relayout.T])
        _, first, group = np.unique(alike, axis=1, return_index=True, return_inverse=True)
        self.group, self.change = group.reshape(-1), instance.relayout[np.ix_(first, first)]
        allowed = np.isfinite(instance.time)
        seconds = np.where(allowed, instance.time, 0.0)[:, None].repeat(stages, axis=1)
        # Only places (layer, stage) reachable from both ends exist; the path stays in a stage or changes it.
        ahead = np.arange(layers)[:, None] - np.arange(stages)
        self.there = (ahead >= 0) & (ahead <= layers - stages)
        stays, changes = np.zeros((2, layers, stages), dtype=bool)
        stays[:-1] = self.there[:-1] & self.there[1:]
        changes[:-1, :-1] = self.there[:-1, :-1] & self.there[1:, 1:]
        begins, enters = np.zeros((2, layers, stages), dtype=bool)
        begins[1:, 1:], begins[0, 0], enters[1:] = changes[:-1, :-1], True, stays[:-1]
        self.node = self._add(self.there[..., None] & allowed[:, None], seconds)
        self.integer = self.columns
        self.end = self._add(changes[..., None] & np.isfinite(instance.send)[:, None], instance.send[:, None])
        self.begin = self._add(begins[..., None] & allowed[:, None], 0.0)
        self.leave = self._add(stays[..., None] & allowed[:, None], 0.0)
        self.enter = self._add(enters[..., None] & allowed[:, None], 0.0)
        self.move = self._add(stays[..., None, None] & np.isfinite(self.change), self.change)
        self.slowest = int(self._add(np.array([np.inf]), instance.micro_batches - 1.0)[0])
        self.moment = self._add(np.full(stages, np.inf), 0.0)  # in parts of the memory
        self._flow()
        self._limits(below)

    def _add(self, most: Array, cost: Array) -> Array:
        """Add columns from 0 up to `most`."""
        numbers = np.arange(self.columns, self.columns + most.size).reshape(most.shape)
        self.columns += most.size
        self.upper.append(most.reshape(-1).astype(np.float64))
        self.cost.append(np.where(most, cost, 0.0).reshape(-1))
        return numbers

    def _row(self, plus: Array, minus: Array, least: float, most: float) -> None:
        columns = np.concatenate([np.reshape(plus, -1), np.reshape(minus, -1)])
        self.rows.append((columns, np.repeat([1.0, -1.0], [np.size(plus), np.size(minus)]), least, most))

    def _flow(self) -> None:
        """Add the flow into a node, from the stage before or the layer before in its stage, and out of it."""
        layers, stages, strategies = self.node.shape
        self._row(self.begin[0, 0], [], 1.0, 1.0)
        self._row(self.node[-1, -1], [], 1.0, 1.0)
        for layer, stage in np.argwhere(self.there):
            for at in ((layer, stage, k) for k in range(strategies)):
                self._row([self.begin[at], self.enter[at]], self.node[at], 0.0, 0.0)
                if layer < layers - 1:
                    self._row([self.end[at], self.leave[at]], self.node[at], 0.0, 0.0)
            if layer == layers - 1:
                continue
            for group in range(len(self.change)):
                of = self.group == group
                self._row(self.leave[layer, stage, of], self.move[layer, stage, group], 0.0, 0.0)
                self._row(self.enter[layer + 1, stage, of], self.move[layer, stage, :, group], 0.0, 0.0)
            if stage < stages - 1:
                self._row(self.end[layer, stage], self.begin[layer + 1, stage + 1], 0.0, 0.0)

    def _limits(self, below: float) -> None:
        instance = self.instance
        cost = np.concatenate(self.cost)
        for stage in range(instance.stages):
            inside = np.concatenate([self.node[:, stage].reshape(-1), self.move[:, stage].reshape(-1)])
            for columns in (inside, self.end[:, stage].reshape(-1)):
                self._weighted([*columns, self.slowest], [*cost[columns], -1.0], 0.0)
            scale = 1 / max(1.0, float(instance.memory[stage]))
            size = (instance.states + instance.flight[stage] * instance.kept).reshape(-1) * scale
            columns = [*self.node[:, stage].reshape(-1), self.moment[stage]]
            self._weighted(columns, [*size, 1.0], float(instance.memory[stage]) * scale)
            for layer in np.flatnonzero(instance.moment.any(axis=1)):
                columns = [*self.node[layer, stage], self.moment[stage]]
                self._weighted(columns, [*(instance.moment[layer] * scale), -1.0], 0.0)
        if np.isfinite(below):
            self._weighted(np.flatnonzero(cost), cost[cost != 0] / below, 1.0)

    def _weighted(self, columns: Any, factors: Any, most: float) -> None:
        self.rows.append((np.asarray(columns), np.asarray(factors, dtype=np.float64), -np.inf, most))

    def program(self, highspy: Any) -> Any:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.columns, len(self.rows)
        program.col_cost_, program.col_lower_ = np.concatenate(self.cost), np.zeros(self.columns)
        program.col_upper_ = np.concatenate(self.upper)
        program.row_lower_ = np.array([row[2] for row in self.rows])
        program.row_upper_ = np.array([row[3] for row in self.rows])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = self.columns, len(self.rows)
        matrix.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)])
        matrix.index_ = np.concatenate([row[0] for row in self.rows]).astype(np.int32)
        matrix.value_ = np.concatenate([row[1] for row in self.rows])
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kInteger if i < self.integer else kinds.kContinuous for i in range(self.columns)]
        return program

    def plan(self, values: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the cuts and strategies of a solution."""
        chosen = values[self.node].reshape(len(self.node), -1).argmax(axis=1)
        stage, strategy = np.divmod(chosen, self.node.shape[2])
        cuts = np.searchsorted(stage, np.arange(self.instance.stages + 1))
        return tuple(cuts.tolist()), tuple(strategy.tolist())
