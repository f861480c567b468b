"""Both scanners against json.loads: on every real trace, on texts made to be hard, and cut at every byte."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.traces.reading import NONE, read_trace
from meshwright.traces.reading.columns import INNER
from meshwright.traces.reading.reading import Scanner
from tests.traces.test_reference import HERE, TRACES
from tests.traces.traces_as_text import SCANNERS, damage, plainly, read_text, rows

scanners = pytest.mark.parametrize("scanner", SCANNERS, ids=lambda kind: kind.__name__)

HARD = r"""
 {"schemaVersion" : 1, "braces" : "}]\"{", "deviceProperties":[{"id":0,"name":"a \"b\" \\"}],
  "traceEvents":[
{"args":{"Input Dims":[[1,[2,{"correlation":99}]],[],"]}"],"correlation": 7 ,"stream":3,"note":"\\","External id":-5},
 "dur" : 2.0005,"ts":1712195495520870.926,"tid":"7","pid":7,"name":"void k<\"a\", '\\'>(\u00e9\ud83d\ude00)","cat":"kernel",
 "ph":"X"}
,{"ph":"X","cat":"cpu_op","name":"ünï\tcode 😀","pid":1,"tid":2,"ts":1e3,"dur":-4,"args":{}},
{"ph":"f","id":123456789012,"pid":0,"tid":7,"ts":5,"cat":"ac2g","name":"ac2g","bp":"e"}, 17, "loose", null, [1,{"ph":"X"}],
{"ph":"X","name":"\\\\","pid":"Spans","tid":"","ts":0.1,"dur":0,"args":null},{}  ,
{"ph":"X","cat":"gpu_memcpy","name":"Memcpy","pid":0,"tid":7,"ts":"12.5","dur":1.0004999,
 "args":{"bytes":4096,"memory bandwidth (GB/s)":Infinity,"device":0,"Py\u0074hon":NaN,"\u0073tream":9}},
{"ph":"M","name":"process_name","pid":1,"args":{"name":"python \"x\"","labels":"CPU"}},
{"ph":"i","s":"t","name":"[memory]","cat":"cpu_instant_event","pid":1,"tid":1,"ts":9,
 "args":{"Bytes":-512,"Total Allocated":0,"Device Type":1,"Device Id":-1,"Addr":140737488355328}},
{"ph":"X","ts":7,"dur":1,"name":"twice","name":"last","args":{"stream":1},"args":{"Collective name":"allreduce",
 "In msg nelems":10,"dtype":"BFloat16","Process Group Name":"0","Group size":8,"Seq":3}},
{"ph":"X","dur":1,"name":"no time"},{"ph":"X","ts":8,"name":"no duration"}
], "after": {"traceEvents": []}, "distributedInfo":{"rank":5}}
"""


@scanners
@pytest.mark.parametrize("name", HERE)
def test_real_traces(name: str, scanner: Callable[[], Scanner]) -> None:
    found = read_trace(TRACES / name, scanner=scanner())
    text = gzip.decompress((TRACES / name).read_bytes())
    assert rows(found) == plainly(text)
    assert found.notes == ()
    assert found.header == {key: value for key, value in json.loads(text).items() if key != "traceEvents"}


@scanners
def test_inputs_of_operators_and_ids_of_functions(scanner: Callable[[], Scanner]) -> None:
    trace = read_text(
        r"""[{"ph":"X","ts":1,"dur":2,"args":{"Input Dims":[[8,512],[]],"Input type":["c10::BFloat16","Scalar"],
        "Concrete Inputs":["","\u0031\"]"],"Sequence number":12,"Fwd thread id":1}}, {"ph":"X","ts":1,"dur":2},
        {"ph":"X","ts":1,"dur":2,"args":{"Python id":3,"Python parent id":null,"Python module id":4,"Input Dims":7}},
        {"ph":"X","ts":1,"dur":2,"args":{"Input Dims":"[[8,512],[]]","Concrete Inputs":"\u0031\""}}]""",
        scanner(),
    )
    found = trace.operators
    assert found.row.tolist() == [0, 2, 3]
    assert [trace.texts[text] for text in found.dims] == ["[[8,512],[]]", "", "[[8,512],[]]"]
    assert [trace.texts[text] for text in found.types] == ['["c10::BFloat16","Scalar"]', "", ""]
    assert [trace.texts[text] for text in found.concrete] == [r'["","\u0031\"]"]', "", '1"']
    assert found.sequence.tolist() == [12, NONE, NONE]
    assert found.forward_thread.tolist() == [1, NONE, NONE]
    assert found.python.tolist() == [NONE, 3, NONE]
    assert found.python_parent.tolist() == [NONE, NONE, NONE]
    assert found.python_module.tolist() == [NONE, 4, NONE]


@scanners
def test_hard_text_in_windows_of_every_size(scanner: Callable[[], Scanner]) -> None:
    wanted = plainly(HARD)
    assert len(wanted) == 10
    for chunk in range(1, len(HARD.encode()) + 2):
        found = read_text(HARD, scanner(), chunk)
        assert rows(found) == wanted, chunk
        assert found.rank == 5
        assert found.header["after"] == {"traceEvents": []}


@scanners
def test_what_was_left_out_or_changed_is_told(scanner: Callable[[], Scanner]) -> None:
    assert {note.what.split(": ")[1]: note.count for note in read_text(HARD, scanner()).notes} == {
        "a complete event without a time": 1,
        "an item of the list that is no event": 4,
        "a negative duration": 1,
        "the missing duration of a complete event": 1,
        "an event without a phase (ph)": 1,
        "a complete event without a category (cat)": 3,
    }


@scanners
def test_text_cut_at_every_byte_gives_the_events_before(scanner: Callable[[], Scanner]) -> None:
    """A whole event is one that its closing bracket ends."""
    text = HARD.encode()
    wanted = plainly(HARD)
    last = 0
    for cut in range(len(text.rstrip())):
        try:
            found = read_text(text[:cut], scanner())
        except InputError:
            assert last == 0
            continue
        assert rows(found) == wanted[: len(found.events)]
        assert any(note.what.endswith(("the text ends in the middle", "a value does not end")) for note in found.notes)
        assert len(found.events) >= last
        last = len(found.events)
    assert last == len(wanted)


KNOWN = [key.word for key in INNER]
numbers = st.one_of(
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.integers(-(10**6), 10**6),
    st.decimals(-(10**12), 10**15, places=3).map(lambda value: float(value)),
    st.floats(allow_nan=False, allow_infinity=False),
)
scalars = st.one_of(numbers, st.text(max_size=8), st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args", "bp", "s"])
phases = st.sampled_from(["X", "s", "f", "i", "M"])
args = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=6), values, max_size=6)
events = st.one_of(
    st.fixed_dictionaries(
        {"ph": phases, "ts": numbers, "dur": numbers, "args": args},
        optional={"cat": st.sampled_from(["kernel", "cpu_op", "x"]), "name": st.text(), "pid": scalars, "tid": scalars},
    ),
    st.dictionaries(keys, values),
)


@scanners
@settings(max_examples=150, deadline=None)
@given(
    made=st.lists(events | values, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 300),
)
def test_generated_text(
    scanner: Callable[[], Scanner], made: list[Any], indent: int | None, ascii_only: bool, chunk: int
) -> None:
    text = json.dumps({"traceEvents": made, "z": 1}, indent=indent, ensure_ascii=ascii_only)
    found = read_text(text.encode("utf-8", "surrogatepass"), scanner(), chunk)
    assert rows(found) == plainly(text)
    assert found.header == {"z": 1}


@scanners
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"ph":"X","ts":1,"dur":2,"name":"a: inf, b","args":{"a":inf,"b":[nan, -inf],"device":4}}', "a: inf, b"),
        (b'{"ph":"X","ts":1,"dur":2,"name":"caf\xe9","args":{"k\xe9y":1,"device":4}}', "caf\ufffd"),
        (b'{"ph":"X","ts":1,"dur":2,"name":"a\x01\tb","args":{"k\x02":"\n","device":4}}', "a\x01\tb"),
        (b'{"ph":"X","ts":1,"dur":2,"name":"a\\qb\\\\","args":{"k\\q":"\\u12","device":4}}', None),
    ],
)
def test_what_writers_print_and_json_does_not_know(
    scanner: Callable[[], Scanner], text: bytes, name: str | None
) -> None:
    found = read_text(b"[%s, %s]" % (text, text), scanner())
    assert [(row["device"], row["ts"], row["dur"]) for row in rows(found)] == [(4, 1000, 2000)] * 2
    assert name is None or {row["name"] for row in rows(found)} == {name}


SKIPPED = "left out: what is no JSON or does not end, at byte {}, up to the next event"
GOOD = '{"ph":"X","ts":4,"dur":1,"name":"after","args":{"name":"x","Input Dims":[[1]]}}'


@scanners
@pytest.mark.parametrize(
    "bad",
    [
        '{"ph":"X" "ts":3}',
        '{"ph":"X","ts":}',
        '{"ph":"X","ts":3,"args":{"name":"no end","a":[1,2}',
        '{"ph":"X","ts":3,"name":"quo"te","dur":1}',
        '{"ph":"X","ts":3,"name":"no quote,"dur":1,"args":{"name":"y"}}',
        '{"ph":"X","ts":3,"args":{"a":1},',
        "}",
        "<html>, {}",
        '{"ph":"X","ts":3,"args":{"Input Dims":[["a" "b]]}},"dur":2}',
    ],
)
def test_what_is_no_json_ends_at_the_next_event(scanner: Callable[[], Scanner], bad: str) -> None:
    text = f'{{"traceEvents":[{{"ph":"X","ts":1,"dur":2}},{bad},\n {GOOD},{GOOD}], "after": 7}}'
    for chunk in (*range(1, 200, 7), 1 << 16):
        found = read_text(text, scanner(), chunk)
        assert [row["ts"] for row in rows(found)] == [1000, 4000, 4000], chunk
        assert damage(found) == [SKIPPED.format(42)]
        assert found.header == {"after": 7}


@scanners
def test_commas_too_few_or_too_many_lose_nothing(scanner: Callable[[], Scanner]) -> None:
    found = read_text(f"[,{GOOD} {GOOD},,\n{GOOD},]", scanner())
    assert len(found.events) == 3
    assert damage(found) == []


@scanners
def test_many_bad_events_are_counted(scanner: Callable[[], Scanner]) -> None:
    text = "[" + ",\n".join([GOOD, '{"ph":"X","ts":nope nope}'] * 500) + "]"
    found = read_text(text, scanner(), 1000)
    assert len(found.events) == 500
    assert found.notes[0].count == 499
    assert found.notes[0].what == SKIPPED.format(len(GOOD) + 3).replace(", at", ", for the first time at")
    assert found.notes[1].what.endswith("where it is no JSON")


@scanners
@pytest.mark.parametrize("key", ["pid", "args", "name", "ph", "ts", "z"])
@pytest.mark.parametrize("nested", ["[{}]", '{{"a":{}}}'])
def test_values_of_any_depth(scanner: Callable[[], Scanner], key: str, nested: str) -> None:
    """Deeper than Python's own reader goes; an event whose time is such a thing has none."""
    before, after = nested.format("|").split("|")
    deep = before * 20_000 + "1" + after * 20_000
    for event in (f'"{key}":{deep}', f'"args":{{"{key}":{deep},"Input Dims":{deep}}}'):
        found = read_text(f'[{GOOD},{{"ph":"X","ts":1,"dur":2,{event}}},{GOOD}]', scanner())
        assert len(found.events) == (2 if event.startswith('"ts"') else 3)


@scanners
@pytest.mark.parametrize(
    ("phase", "letter"),
    [(r"\u0058", "X"), (r"\u00zz", ""), (r"\u00 8", ""), (r"\u0-58", ""), (r"\u00+8", ""), (r"\u005", ""), (r"\q", "")],
)
def test_phases_with_escapes(scanner: Callable[[], Scanner], phase: str, letter: str) -> None:
    found = read_text(f'[{{"ph":"{phase}","ts":1,"dur":2,"name":"a"}}]', scanner())
    assert bytes(found.events.phase).decode().strip("\0") == letter


HARM = [b"", b'"', b"{", b"}", b"]", b",", b"\\", b"nan", b"\xe9"]


@scanners
@settings(max_examples=300, deadline=None)
@given(
    made=st.lists(events, min_size=1, max_size=4),
    harm=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(HARM)), min_size=1, max_size=3),
    chunk=st.integers(1, 300),
)
def test_both_scanners_agree_on_damaged_text(
    scanner: Callable[[], Scanner], made: list[Any], harm: list[tuple[int, bytes]], chunk: int
) -> None:
    """A byte replaced by something else, or taken away, anywhere among the events."""
    text = bytearray(json.dumps({"traceEvents": made, "z": 1}).encode())
    for place, what in harm:
        place = 16 + place % max(len(text) - 16, 1)
        text[place : place + 1] = what
    told = []
    for kind, size in ((SCANNERS[0], chunk), (scanner, 1 << 16)):
        try:
            found = read_text(bytes(text), kind(), size)
            told.append(([repr(row) for row in rows(found)], found.notes, found.header))
        except InputError as error:
            told.append(str(error))
    assert told[0] == told[1]
