"""Compressed gradients of `DistributedDataParallel`: `ddp.register_comm_hook(Synchroniser(choice), hook)`."""

# Annotations are real objects here: DDP checks those of a hook.

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwright.compression.sync.bucket import Bucket, Gradients, Memory, as_it_lies
from meshwright.compression.sync.engine import Engine
from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.options import Options
from meshwright.compression.sync.transport.agreement import described
from meshwright.compression.sync.transport.failure import Failed, Fault
from meshwright.compression.sync.transport.join import joined
from meshwright.compression.sync.transport.message import Stamp
from meshwright.compression.sync.transport.wire import TAGS, Traffic, Transfer
from meshwright.errors import InputError


class Synchroniser:
    """Synchroniser that averages buckets of gradients over all ranks of a group.

    All ranks create it at the same time, and submit the same buckets in the same order. The choice is one of:

    - a `Choice` for all gradients
    - a function from the sizes of a bucket's gradients to a choice for each
    - `meshwright.compression.auto.Auto`

    Gradients of a CUDA device are encoded and decoded there, on a stream of its own; messages are sent from host
    memory.
    """

    def __init__(
        self,
        choice: Any,
        options: Options | None = None,
        *,
        group: Any = None,
        traffic: Traffic | None = None,
        names: Mapping[int, str] | None = None,
        owned: bool = False,
    ) -> None:
        """Join the other ranks, and start the threads.

        - `names`: names of parameters by identity, for checkpoints.
        - `owned`: `Auto` assumes that sums stay with the ranks that own their parts.
        """
        self.options, self.names = options or Options(), dict(names or {})
        self.step = 0
        self.traffic = traffic or Traffic()
        self._choice = _valid(choice)
        self._leave: list[Callable[[], None]] = []  # called when it is closed
        wanted = f"{described(choice)}; {self.options.told()}"
        self._wires, witness = joined(group, self.options.node, self.options.limit, self.traffic, wanted)
        self._residuals, self._momenta, self._warm = Memory(), Memory(), Memory()
        self._stream: Any = None  # of the first CUDA device with gradients
        self._buckets: dict[tuple[int, Gradients, int, int], Any] = {}
        self._tag = 0
        self._witness = witness
        self._engine = Engine(self._told)
        self.pilot: Any = None  # the controller, if the choice is left to it
        if not isinstance(choice, Choice) and not callable(choice):
            from meshwright.compression.auto.controller import Controller

            def submit(strands: Sequence[Any]) -> None:
                self._engine.submit(strands, True).wait()

            self.pilot = Controller(choice, self._wires.all, submit, feedback=self.options.error_feedback, owned=owned)

    @property
    def error(self) -> Exception | None:
        """The error that makes everything fail from now on: a `PeerLost` if a peer was lost."""
        return self._engine.error

    def gradients(self, parameters: Sequence[Tensor]) -> Gradients:
        """Return the gradients of some parameters, one after the other."""
        keys = tuple(self.names.get(id(one), id(one)) for one in parameters)
        return Gradients(keys, tuple(as_it_lies(one) for one in parameters))

    def submit(self, flat: Tensor, gradients: Gradients, bucket: int = 0, *, last: bool = True) -> Future[Tensor]:
        """Start to average a bucket in place; `last`: the step ends with it. Returns at once."""
        if flat.device.type not in ("cpu", "cuda") or not flat.is_contiguous() or not flat.is_floating_point():
            problem = f"{flat.dtype} on {flat.device}, {flat.layout}"
            raise InputError(problem, field="bucket", valid="real numbers, dense, on a CPU or CUDA device")
        if flat.numel() != sum(gradients.counts):
            problem = f"{flat.numel()} numbers for gradients of {sum(gradients.counts)}"
            raise InputError(problem, field="bucket", valid="all numbers of its gradients")
        if self.pilot and flat.is_cuda:
            raise InputError("Auto decides for gradients on CPUs", field="choice", valid="a Choice, on CUDA devices")
        return self._begin(flat, gradients, bucket, last, flat)

    def _begin(self, given: Any, gradients: Gradients, bucket: int, last: bool, result: Tensor) -> Future[Tensor]:
        """Submit `given` to a bucket's strands; the future's value is the `result` that they write."""
        if self.pilot:
            self._asked(self.pilot.settle, bucket)
        looking = self._looking()
        place = (bucket, gradients, self._stage(), -1 if looking else self.pilot.version if self.pilot else 0)
        if place not in self._buckets:
            # DDP rebuilds its buckets after the first step: older buckets with the same parameters are obsolete.
            fresh = set(gradients.keys)
            self._buckets = {key: made for key, made in self._buckets.items() if fresh.isdisjoint(key[1].keys)}
            self._buckets[place] = self._made(gradients, bucket, result.device)
        made = self._buckets[place]
        if looking:
            self.pilot.look(bucket, gradients, result)
        elif self.pilot and made.exact and self.error is None:
            return self._by_backend(given, gradients, bucket, last)
        strands = made.strands(given, self.step, bucket, self._tag)
        self._tag = (self._tag + made.rounds) % TAGS
        if self.pilot:
            return self._piloted(result, gradients, bucket, strands, last=last, looking=looking)
        self.step += last
        if not result.is_cuda:
            return self._engine.submit(strands, result)
        if self._stream is None:
            self._stream = torch.cuda.Stream(result.device, priority=-1)  # short work that others wait for
        # Gradients and new buffers are ready when the caller's stream reaches this point.
        ready = torch.cuda.current_stream(result.device).record_event()
        return self._engine.submit([_after(ready, strand) for strand in strands], result, self._stream)

    def stands_aside(self, buckets: Sequence[Gradients]) -> bool:
        """Return True if `Auto` leaves these to DDP for now; all ranks ask at the same time."""
        return bool(self._asked(self.pilot.stands_aside, 0, buckets))

    def watch(self, gradients: Gradients, bucket: int, *, last: bool) -> bool:
        """Record that a bucket averaged elsewhere is ready; return True if the next ones should come here."""
        self._asked(self.pilot.settle, bucket)
        pays = any(one.codec for one in self._asked(self.pilot.choices, bucket, bucket, gradients))
        self._handed(gradients, bucket, last)
        return pays

    def _handed(self, gradients: Gradients, bucket: int, last: bool) -> None:
        """Report a bucket to the controller."""
        self.pilot.handed(gradients)
        if last:
            self._end_step(bucket)

    def _end_step(self, bucket: int) -> None:
        """Let the controller vote if it is time."""
        votes, stamp = self.pilot.ended(self.step), Stamp(self.step, bucket, self._tag)
        self.step += 1
        if votes:
            self._tag = (self._tag + self.pilot.rounds) % TAGS
            self.pilot.voting(self._engine.submit([self.pilot.strand(stamp)], True))

    def _by_backend(self, given: Any, gradients: Gradients, bucket: int, last: bool) -> Future[Tensor]:
        """Run the backend's own all-reduce if nothing pays: without threads and messages of ours."""
        wire, step = self._wires.all, self.step
        work = dist.all_reduce(given.div_(wire.size), group=wire.group, async_op=True)
        self._handed(gradients, bucket, last)

        def arrived(done: Future[Any]) -> Tensor:
            try:
                done.value()
            except RuntimeError as error:
                raise self._failed("an all-reduce failed", step, bucket) from error
            self.traffic.spend(2 * (wire.size - 1) * given.nbytes // wire.size)
            summed: Tensor = given
            return summed

        summed: Future[Tensor] = work.get_future().then(arrived)
        return summed

    def _failed(self, reason: str, step: int, bucket: int) -> Exception:
        """Return the error for sums that the backend could not make."""
        return self._engine.fail(Failed(Fault(-1, reason, step, bucket)))

    def wait(self, future: Future[Tensor]) -> Tensor:
        """Wait for a submitted bucket; raises `PeerLost` itself, where PyTorch's future would keep only its text."""
        try:
            return future.wait()
        except RuntimeError:
            if self.error is not None:
                raise self.error from None
            raise

    def _asked(self, question: Callable[..., Any], bucket: int, *arguments: Any) -> Any:
        """Return the first rank's answer on all ranks: a message of its own, which may fail like others."""
        stamp = Stamp(self.step, bucket, self._tag)
        self._tag = (self._tag + 1) % TAGS
        try:
            return question(*arguments, stamp)
        except Failed as failed:
            raise self._told(failed) from failed

    def _looking(self) -> bool:
        """Return True if sums of this step are exact, so that the controller can compare."""
        return bool(self.pilot and self.pilot.looking(self.step) and not self._warming())

    def _piloted(
        self, flat: Tensor, gradients: Gradients, bucket: int, strands: list[Any], *, last: bool, looking: bool
    ) -> Future[Tensor]:
        """Submit a bucket under observation of the controller."""
        pilot = self.pilot
        future = self._engine.submit([pilot.timed(strand) for strand in strands], flat)
        if looking:
            future = future.then(lambda done: (pilot.seen(bucket, gradients, flat), done.value())[1])
        self._handed(gradients, bucket, last)
        return future

    def explain(self) -> str:
        """Return the decisions of `Auto` as a table: strategy of every bucket, prediction, outcome and changes."""
        from meshwright.compression.auto.table import explained

        return explained(self.pilot)

    def rules(self, names: Mapping[Any, str] | None = None, model: Any = None) -> tuple[Any, ...]:
        """Return the decisions of `Auto` as a plan's `compression`.

        `names` maps names of parameters to those of layers, if they differ. With a `meshwright.Model`, consecutive
        layers with one strategy become one rule.
        """
        from meshwright.compression.auto.table import rules_of

        return rules_of(self.pilot, names, model)

    def residual(self, key: Any) -> Tensor | None:
        """Return this rank's residual of a parameter's gradient, by its name or identity."""
        return self._residuals.kept.get(self.names.get(key, key))

    def _told(self, error: Exception) -> Exception:
        return self._witness.verdict(error.fault) if isinstance(error, Failed) else self._witness.confess(error)

    @property
    def _kept(self) -> dict[str, Memory]:
        """State that lasts between steps, by its name in checkpoints."""
        return {"residual": self._residuals, "momentum": self._momenta, "warm": self._warm}

    def state(self) -> dict[str, Tensor]:
        """Return the state of the next step for a checkpoint; keys must be names. Tensors are views: copy them."""
        found = {f"{what}/{key}": one for what, memory in self._kept.items() for key, one in memory.kept.items()}
        return {"counters": torch.tensor([self.step, self._tag]), **found}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`, before the first bucket is submitted."""
        if "counters" not in state:
            raise InputError("has no counters", field="state", valid="what `state()` has given")
        for name, value in state.items():
            what, _, key = name.partition("/")
            if key:
                self._kept[what].kept[key] = value
        self.step, self._tag = map(int, state["counters"])

    def close(self) -> None:
        """End its threads. Later gradients are refused; DDP without a hook goes on alone."""
        leave, self._leave = self._leave, []
        for one in leave:
            one()
        if self._engine.close() and self.error is None:
            self._wires.close()

    def at_close(self, leave: Callable[[], None]) -> None:
        """Register a function to be called at close."""
        self._leave.append(leave)

    def _stage(self) -> int:
        """Return the stage of the warm-up; after it, the number of stages."""
        return sum(self.step >= until for until, _ in self.options.warm_up)

    def _warming(self) -> Choice | None:
        """Return the choice that replaces the usual one during the warm-up, or None."""
        stage = self._stage()
        return self.options.warm_up[stage][1] if stage < len(self.options.warm_up) else None

    def _made(self, gradients: Gradients, bucket: int, device: torch.device) -> Any:
        counts, choice = gradients.counts, self._warming() or (Choice() if self._looking() else self._choice)
        if isinstance(choice, Choice):
            choices: Sequence[Choice] = [choice] * len(counts)
        else:
            choices = choice(counts) if callable(choice) else self._asked(self.pilot.choices, bucket, bucket, gradients)
            if not isinstance(choices, Sequence) or not all(isinstance(one, Choice) for one in choices):
                raise InputError(f"gave {choices!r}", field="choice", valid="a Choice for each of the sizes")
        return self._bucket(gradients, choices, device)

    def _bucket(self, gradients: Gradients, choices: Sequence[Choice], device: torch.device) -> Bucket:
        keys, counts, factor = gradients.keys, gradients.counts, self.options.momentum
        residual = self._residuals.flat(keys, counts, device) if self.options.error_feedback else None
        momentum = (factor, self._momenta.flat(keys, counts, device)) if factor else None
        memory: dict[str, Any] = {"residual": residual, "momentum": momentum, "warm": self._warm}
        return Bucket(gradients, choices, self._wires, **memory, device=device, mean=self.options.mean)


def _after(ready: Any, strand: Iterator[Transfer]) -> Iterator[Transfer]:
    """Run a strand whose first work waits, on the device, for another stream."""
    torch.cuda.current_stream().wait_event(ready)
    yield from strand


def hook(state: Synchroniser, bucket: dist.GradBucket) -> Future[Tensor]:
    """Communication hook of `DistributedDataParallel`; its state is a `Synchroniser`."""
    return state.submit(bucket.buffer(), state.gradients(bucket.parameters()), bucket.index(), last=bucket.is_last())


def _valid(choice: Any) -> Any:
    if isinstance(choice, Choice) or callable(choice) or hasattr(choice, "ways"):
        return choice
    raise InputError(f"is {choice!r}", field="choice", valid="Choice(codec('int8'), 'scatter'), Auto(), or a function")
