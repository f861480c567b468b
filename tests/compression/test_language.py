"""Algorithms of one's own: all that can be written gives the same in C and in NumPy; what cannot is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.base.native import compiler
from meshwright.compression import Codec, codec, codecs
from meshwright.compression import language as l
from meshwright.errors import InputError
from tests.compression.data import SIZES, both, numbers, received, sent

Maker = Any


def _arithmetic() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        size = l.root(l.mean(g * g)) + 1e-20
        odd = l.where((l.index() > 3) & ~l.equal(l.index(), 7) | (g > 0), 1, 2)
        code = l.smaller(l.floor(l.magnitude(g) / size), 9) + odd
        return {
            "code": l.pack(code, 4),
            "size": l.half(size * 1e3),
            "ups": l.total(l.where(g > 0, 1, 0)),
            "most": l.largest(odd),
        }

    def decode(m: l.Fields) -> l.Node:
        return -(m["code"] - 1.5) * m["size"] / 1000 + (m["ups"] - m["most"]) * 2.0 / l.count()

    return Codec("arithmetic", encode, decode)


def _blocks_of_blocks() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        low, high = l.smallest(g, 64), l.largest(g, 64)
        middle = (low + high) / 2
        spread = l.total(l.magnitude(g - middle), 64) / 64
        top = l.largest(g)
        code = l.where(spread > 0, (g - middle) / spread * 16, 0.0)
        return {
            "code": l.pack(l.nearest(code) + 128, 8),
            "middle": l.half(middle, bfloat=True),
            "spread": spread,
            "top": top,
        }

    def decode(m: l.Fields) -> l.Node:
        return l.smaller((m["code"] - 128) * m["spread"] / 16 + m["middle"], m["top"])

    return Codec("blocks", encode, decode)


def _chosen_arithmetic() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        tau = l.threshold(l.magnitude(g), 0.2)
        chosen = l.choose(l.magnitude(g) >= tau, 0.2)
        return {
            "tau": tau,
            "at": chosen.index,
            "value": l.half(chosen.take(g) / tau),
            "sign": chosen.take(l.where(g > 0, 1, -1)),
        }

    def decode(m: l.Fields) -> l.Node:
        return l.spread(m["at"], m["value"] * m["tau"]) * 2.0 - l.spread(m["at"], m["sign"] * m["tau"])

    return Codec("chosen", encode, decode)


def _one_statistic_after_another() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        mean = l.mean(g)
        apart = l.mean(l.magnitude(g - mean))
        beyond = l.total(l.where(l.magnitude(g - mean) > apart, g, 0.0))
        return {"mean": mean, "apart": apart, "beyond": beyond, "side": l.pack(g > mean, 1)}

    def decode(m: l.Fields) -> l.Node:
        return l.where(m["side"] > 0, m["mean"] + m["apart"], m["mean"] - m["apart"]) + 0 * m["beyond"]

    return Codec("levels", encode, decode)


def _agreed_and_own() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        top, mean = l.agreed(l.largest(l.magnitude(g))), l.mean(g)
        code = l.where(top > 0, (g - mean) / top * 50, 0.0)
        return {"code": l.pack(l.nearest(code), 16, signed=True), "top": top, "mean": mean}

    def decode(m: l.Fields) -> l.Node:
        return m["code"] * m["top"] / 50 + m["mean"]

    return Codec("agreed", encode, decode)


def _many_codes() -> Codec:
    def encode(g: l.Node) -> l.Sent:
        low = l.pack(g / 1e-3 + 2, 2)
        return {
            "a": l.pack(g > 0, 1),
            "b": low,
            "c": l.pack(g > 1e-3, 1),
            "d": l.pack(l.index(), 4),
            "e": l.pack(-g, 8),
        }

    def decode(m: l.Fields) -> l.Node:
        return m["a"] + m["b"] * 2.0 + m["c"] * 8 + m["d"] * 16 + m["e"] * 256

    return Codec("codes", encode, decode)


def _plain_numbers() -> Codec:
    return Codec("plain", lambda g: {"number": l.larger(g, -1e-3), "sixteen": l.pack(g > 0, 16)}, lambda m: m["number"])


OWN = [_arithmetic(), _blocks_of_blocks(), _chosen_arithmetic(), _one_statistic_after_another(), _agreed_and_own()]


@pytest.mark.skipif(not compiler(), reason="no C compiler")
@pytest.mark.parametrize("one", [*OWN, _plain_numbers(), _many_codes()], ids=lambda one: one.name)
@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "heavy"])
def test_c_and_numpy_agree(one: Codec, kind: str) -> None:
    native, portable = both(one, SIZES)
    flat = numbers(kind, sum(SIZES))
    mine, theirs = (numbers("normal", sum(SIZES), 3) for _ in range(2))
    message = sent(native, flat, mine)
    assert torch.equal(message, sent(portable, flat, theirs))
    assert torch.equal(mine, theirs)
    out = received(native, message)
    assert torch.equal(out, received(portable, message))
    assert torch.equal(mine, flat + numbers("normal", sum(SIZES), 3) - out)


@pytest.mark.skipif(not compiler(), reason="no C compiler")
def test_what_was_agreed_is_used_and_the_rest_is_found_anew() -> None:
    for batch in both(_agreed_and_own(), [100]):
        flat = numbers("normal", 100)
        batch.measure(flat)
        assert float(batch.agreed[0]) == float(flat.abs().max())
        batch.agreed.fill_(1.0)
        message = batch.new_message()
        batch.encode(flat, message, agreed=True)
        step = 1 / 50
        assert (received(batch, message) - flat).abs().max() <= step / 2 + 1e-6


def g() -> l.Node:
    return l.gradient()


WRONG = {
    "bits of every gradient": lambda: l.pack(l.mean(g()), 4),
    "3 bits of every number": lambda: l.pack(g(), 3),
    "no truth of its own": lambda: 1 if g() > 0 else 0,
    "equal(x, y) instead of ==": lambda: l.where(g() == 0, 1, 2),  # type: ignore[arg-type]
    "mixes chosen numbers": lambda: l.choose(g() > 0, 0.1).take(g()) + g(),
    "mixes blocks of": lambda: l.largest(g(), 32) + l.largest(g(), 64),
    "a power of two from 32": lambda: l.largest(g(), 100),
    "is reduced": lambda: l.mean(l.mean(g())),
    "combines what are no tests": lambda: g() & (g() > 0),
    "is no test of every number": lambda: l.choose(g(), 0.1),
    "more than 0, at most 1": lambda: l.threshold(g(), 1.5),
    "a number that 32 bits can hold": lambda: g() + "one",
    "one value of the whole gradient": lambda: l.agreed(g()),
    "spreads what was not chosen": lambda: l.spread(g(), g()),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_written_is_told_where_it_is_written(said: str) -> None:
    with pytest.raises(InputError) as wrong:
        WRONG[said]()
    assert said in str(wrong.value)


def chosen_twice(x: l.Node) -> dict[str, Any]:
    return {"a": l.choose(x > 0, 0.1).index, "b": l.choose(x > 1, 0.1).take(x)}


PROGRAMS: dict[str, tuple[Maker, Maker]] = {
    "returns no fields": (lambda x: {}, lambda m: 0),
    "encode: returns no fields": (lambda x: x, lambda m: 0),
    "decode: returns int": (lambda x: {"a": x}, lambda m: 0),
    "decode: uses gradient": (lambda x: {"a": x}, lambda m: m["a"] + l.gradient()),
    "decode: uses uniform": (lambda x: {"a": x}, lambda m: m["a"] + l.uniform()),
    "decode: uses largest": (lambda x: {"a": x}, lambda m: l.largest(m["a"])),
    "a: is a int of every number": (lambda x: {"a": l.index()}, lambda m: m["a"]),
    "a: is a bool of every number": (lambda x: {"a": x > 0}, lambda m: m["a"]),
    "chooses by several tests": (chosen_twice, lambda m: l.spread(m["a"], m["b"])),
    "blocks of one size": (lambda x: {"a": l.largest(x, 32), "b": l.largest(x, 64)}, lambda m: m["a"]),
    "put there by spread(...)": (lambda x: {"a": l.choose(x > 0, 0.1).take(x)}, lambda m: m["a"] * 2),
    "computes with what was drawn": (
        lambda x: {"a": l.choose(l.draw(0.1).mask & (x > 0), 0.1).index},
        lambda m: l.spread(m["a"], m["a"]),
    ),
    "has places that are no whole numbers": (
        lambda x: {"a": l.choose(x > 0, 0.1).index, "b": l.choose(x > 0, 0.1).take(x)},
        lambda m: l.spread(m["b"], m["a"]),
    ),
    "decode: reads 'b', which encode does not send (valid: a)": (lambda x: {"a": x}, lambda m: m["b"]),
    "a power: is 3": (lambda x: {"a": x**3}, lambda m: m["a"]),
    "a traced value has no places": (lambda x: {"a": x[0]}, lambda m: m["a"]),
    "a traced value has no length": (lambda x: {"a": x * len(x)}, lambda m: m["a"]),
    "samples what needs whole blocks": (
        lambda x: {"a": l.threshold(x - l.largest(x, 32), 0.1, every=8), "n": x},
        lambda m: m["n"],
    ),
}


@pytest.mark.parametrize("said", PROGRAMS)
def test_what_does_not_fit_together_is_told_with_the_name_of_the_codec(said: str) -> None:
    encode, decode = PROGRAMS[said]
    with pytest.raises(InputError) as wrong:
        _ = Codec("mine", encode, decode).program
    assert said in str(wrong.value)
    assert str(wrong.value).startswith("codec mine: ")


def test_unknown_names_and_options_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown codec 'onebits'.*onebit, powersgd, randomk"):
        codec("onebits")
    with pytest.raises(InputError, match=r"terngrad: unknown option 'levels' \(valid: bits\)"):
        codec("terngrad", levels=3)
    with pytest.raises(InputError, match=r"onebit: unknown option.*has no options"):
        codec("onebit", bits=3)
    with pytest.raises(InputError, match=r"terngrad.bits: is '4' \(valid: such as 2\)"):
        codec("terngrad", bits="4")
    with pytest.raises(InputError, match=r"terngrad\.bits: is 3"):
        codec("terngrad", bits=3).bytes([10])
    with pytest.raises(InputError, match="codec homomorphic: members: is 200"):
        codec("homomorphic", members=200).bytes([10])


def test_each_shipped_algorithm_is_short() -> None:
    import inspect

    for name, one in codecs().items():
        lines = inspect.getsource(inspect.getmodule(one.encode)).splitlines()  # type: ignore[arg-type]
        assert sum(bool(line.strip()) for line in lines) < 25, name


def test_buffers_that_do_not_fit_are_refused() -> None:
    batch = codec("onebit").batch([10, 20])
    message, flat = batch.new_message(), torch.zeros(30)
    wrong: list[Any] = [
        lambda: batch.encode(torch.zeros(29), message),
        lambda: batch.encode(flat.half(), message),
        lambda: batch.encode(flat, message[:-1]),
        lambda: batch.encode(flat, message, residual=torch.zeros(30, dtype=torch.float64)),
        lambda: batch.encode(torch.zeros(60)[::2], message),
        lambda: batch.decode(message, torch.zeros(31)),
        lambda: batch.decode(torch.zeros(batch.bytes + 1, dtype=torch.uint8)[1:], flat),
        lambda: codec("onebit").batch([10], dtype=torch.float64),
        lambda: codec("onebit").batch([-1]),
    ]
    for call in wrong:
        with pytest.raises(InputError):
            call()


def test_what_the_page_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/compress.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert "32 times smaller, 0.60 of it is lost" in capsys.readouterr().out
