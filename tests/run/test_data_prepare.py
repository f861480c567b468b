"""Prepared folders against a plain Python re-implementation; whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.base.processes import started_at, state_of
from meshwright.errors import InputError
from meshwright.run.data import Dataset, prepare
from meshwright.run.data import sources as sources_module
from tests.run.texts import END, TEXTS, all_tokens, documents_of, stream_of, write_jsonl


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PIECE", 64)  # every file has many, and lines are longer than one


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_jsonl_is_what_plain_python_makes_of_it(tmp_path: Path, workers: int) -> None:
    made = prepare([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "t", workers=workers, shard_bytes=250)
    assert made is not None
    assert all_tokens(tmp_path / "t") == stream_of(TEXTS)
    assert Dataset(tmp_path / "t").documents(0, made.tokens).tolist() == documents_of(TEXTS)
    assert (made.documents, made.empty, made.vocabulary, made.dtype) == (5, 1, 257, "uint16")
    assert all(shard.bytes <= 250 for shard in made.shards)
    assert len(made.shards) == -(-made.tokens * 2 // 250)
    ends = [i + 1 for i, token in enumerate(stream_of(TEXTS)) if token == END]
    for i, shard in enumerate(made.shards):
        assert shard.documents == sum(i * 125 < end <= (i + 1) * 125 for end in ends)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("last", ["", "\n"])
def test_a_text_file_is_one_document(tmp_path: Path, last: str) -> None:
    text = "\n".join(f"line {i} " + "ü" * (i % 50) for i in range(60)) + last
    (tmp_path / "a.txt").write_text("\ufeff" + text)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.TXT").write_text("short")
    prepare([tmp_path], tmp_path / "t", workers=1)
    assert all_tokens(tmp_path / "t") == stream_of([text, "short"])
    assert Dataset(tmp_path / "t").manifest.empty == 1


def test_parquet_in_row_groups(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"id": range(6), "body": TEXTS}), tmp_path / "a.parquet", row_group_size=2)
    prepare([tmp_path / "a.parquet"], tmp_path / "t", field="body", workers=1)
    assert all_tokens(tmp_path / "t") == stream_of(TEXTS)
    with pytest.raises(InputError, match=r"text: there is no such column.*valid: body"):
        prepare([tmp_path / "a.parquet"], tmp_path / "u")
    with pytest.raises(InputError, match="id: is int64"):
        prepare([tmp_path / "a.parquet"], tmp_path / "u", field="id")
    parquet.write_table(pa.table({"text": ["a", "b", None, "d"]}), tmp_path / "b.parquet", row_group_size=1)
    with pytest.raises(InputError, match="row 2: expected a string, got null"):
        prepare([tmp_path / "b.parquet"], tmp_path / "u")
    made = prepare([tmp_path / "b.parquet"], tmp_path / "u", skip_bad=True)
    assert made is not None
    assert (made.skipped, made.documents) == (1, 3)


def test_folders_and_patterns_in_the_order_given_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    for name in ("b", "deep/z", "deep/er/a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    (tmp_path / "deep/notes.pdf").write_bytes(b"%PDF")
    prepare([tmp_path / "deep", tmp_path / "*.jsonl", tmp_path / "deep/z.jsonl"], tmp_path / "t")
    assert all_tokens(tmp_path / "t") == stream_of(["deep/er/a", "deep/z", "b"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A small byte-pair tokenizer that was trained here."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["hello world " * 20], trainers.BpeTrainer(vocab_size=300, special_tokens=["<stop>"], initial_alphabet=alphabet)
    )
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    return tmp_path / "tok"


def test_a_hugging_face_tokenizer_as_transformers_runs_it(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<stop>")
    texts = ["hello world", "hello <stop>", "🦙", "other words"]
    made = prepare([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "t", tokenizer=str(tokenizer))
    assert made is not None
    expected = [[*reference.encode(text, add_special_tokens=False), reference.eos_token_id] for text in texts]
    assert all_tokens(tmp_path / "t") == [token for document in expected for token in document]
    assert made.vocabulary == len(reference)
    assert made.end_of_document == reference.eos_token_id


def test_a_tokenizer_without_an_end_says_so(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(InputError, match=r"<none>.*eos_token in tokenizer_config"):
        prepare([source], tmp_path / "t", tokenizer=str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="names no token that ends a document"):
        prepare([source], tmp_path / "t", tokenizer=str(tokenizer))
    (tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer"):
        prepare([source], tmp_path / "t", tokenizer=str(tokenizer))
    with pytest.raises(InputError, match="tokenizer: no such file"):
        prepare([source], tmp_path / "t", tokenizer="gpt2")


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["w69999 w1", "w65536"])
    manifest = prepare([source], tmp_path / "t", tokenizer=str(tmp_path / "tokenizer.json"))
    assert manifest is not None
    assert manifest.dtype == "uint32"
    assert all_tokens(tmp_path / "t") == [69_999, 1, 70_000, 65_536, 70_000]


BAD = {
    b'{"text": 3}': "text: expected a string, got a number",
    b'{"body": "a", "id": 1}': "text: is missing; the line has body, id",
    b'{"text": "a"': "malformed JSON",
    b"[1]": "expected an object, got a list",
    b'{"text": "\xff"}': "not UTF-8 text .byte 0xff",
    b'{"text": "\\ud800"}': "surrogate",
    b"[" * 100_000: "nested",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:24])
@pytest.mark.usefixtures("small_pieces")
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' * 20 + b"\n" + line + b'\n{"text": "last"}')
    with pytest.raises(InputError, match=BAD[line]) as caught:
        prepare([path], tmp_path / "t", workers=1)
    assert (caught.value.file, caught.value.line) == (str(path), 22)
    assert not (tmp_path / "t").exists()
    made = prepare([path], tmp_path / "t", skip_bad=True, workers=1)
    assert made is not None
    assert (made.skipped, made.documents) == (1, 21)


def test_errors_of_workers_reach_the_caller(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nbad \xff\n")
    with pytest.raises(InputError, match=r"a\.txt:2:5: is not UTF-8"):
        prepare([tmp_path / "a.txt"], tmp_path / "t", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the system does not count what is read")
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_long_line_is_read_a_few_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bad: bool
) -> None:
    """Once to be tokenised, once by the pieces that lie inside it, once to count the lines before a mistake."""
    monkeypatch.setattr(sources_module, "PIECE", 2**15)
    size = 4 * 2**20
    text, path = b"y" * size, tmp_path / f"a.{kind}"
    path.write_bytes((text if kind == "txt" else b'{"text": "' + text + b'"}') + b"\n\xff" * bad)
    before = _bytes_read()
    if bad:
        with pytest.raises(InputError, match=r":2:1: is not UTF-8 text .byte 0xff"):
            prepare([path], tmp_path / "t", workers=1)
    else:
        prepare([path], tmp_path / "t", workers=1)
    assert size <= _bytes_read() - before < 4 * size
    if not bad:
        assert all_tokens(tmp_path / "t") == [121] * size + [END]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_pieces_hold_every_line_once_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(sources_module, "PIECE", piece)
    texts = ["\n", "a\n\n\nb", "one\ntwo\n", "a long line of some forty characters or so\nb\n", "x\n" * 9 + "end"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    prepare([tmp_path], tmp_path / f"t{piece}", workers=1)
    assert all_tokens(tmp_path / f"t{piece}") == stream_of(texts)


def test_nothing_to_prepare_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(InputError, match="hold no text: 1 files, 2 empty documents"):
        prepare([source], tmp_path / "t")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="folder that holds no text"):
        prepare([tmp_path / "none"], tmp_path / "t")
    with pytest.raises(InputError, match="no such file"):
        prepare([tmp_path / "nowhere.txt"], tmp_path / "t")
    (tmp_path / "a.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"ends in '\.gz'"):
        prepare([tmp_path / "a.gz"], tmp_path / "t")
    assert not (tmp_path / "t").exists()


# --- whole or not at all


def test_a_finished_folder_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "1.jsonl", ["one"]), write_jsonl(tmp_path / "2.jsonl", ["two"])
    prepare([one], tmp_path / "t")
    with pytest.raises(InputError, match=r"already prepared.*--overwrite"):
        prepare([two], tmp_path / "t")
    assert all_tokens(tmp_path / "t") == stream_of(["one"])
    prepare([two], tmp_path / "t", overwrite=True)
    assert all_tokens(tmp_path / "t") == stream_of(["two"])
    (tmp_path / "t/mine.txt").write_text("precious")
    with pytest.raises(InputError, match=r"mine\.txt"):
        prepare([one], tmp_path / "t", overwrite=True)
    with pytest.raises(InputError, match="did not write"):
        prepare([one], tmp_path, overwrite=True)
    assert (tmp_path / "t/mine.txt").read_text() == "precious"


def test_folders_of_the_users_with_our_names_are_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    for name in ("t.part", "t.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"t\.part: holds 'thesis\.tex'"):
        prepare([source], tmp_path / "t")
    (tmp_path / "t.part/thesis.tex").rename(tmp_path / "thesis.tex")
    for overwrite in (False, True):
        prepare([source], tmp_path / "t", overwrite=overwrite)
    assert (tmp_path / "thesis.tex").exists()
    assert (tmp_path / "t.old/thesis.tex").exists()
    (tmp_path / "u.part").write_text("a file")
    with pytest.raises(InputError, match=r"u\.part: is a file"):
        prepare([source], tmp_path / "u")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "t", "t.old", "thesis.tex", "u.part"]


def test_links_are_followed(tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "a.jsonl", ["a"])], tmp_path / "t")
    (tmp_path / "link").symlink_to("t")
    prepare([write_jsonl(tmp_path / "b.jsonl", ["b"])], tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert all_tokens(tmp_path / "t") == stream_of(["b"])


def test_killed_in_the_middle_leaves_nothing_valid(tmp_path: Path) -> None:
    """SIGKILL: no handler runs. The next prepare clears what is left."""
    sources = [str(write_jsonl(tmp_path / f"{i}.jsonl", ["text"] * 50)) for i in range(3)]
    code = (
        "import os, signal, sys; from meshwright.run.data import prepare\n"
        "def progress(done, total):\n    if done > total / 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(sys.argv[2:], sys.argv[1], workers=1, progress=progress)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "t"), *sources], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "t").exists()
    assert (tmp_path / "t.part").exists()
    with pytest.raises(InputError, match="is not prepared"):
        Dataset(tmp_path / "t.part")
    (tmp_path / "t.part/tokens-00007.bin").write_bytes(b"old")
    prepare(sources, tmp_path / "t")
    assert all_tokens(tmp_path / "t") == stream_of(["text"] * 150)
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "documents.bin",
        "manifest.json",
        "tokens-00000.bin",
    ]
    assert not (tmp_path / "t.part").exists()


# Python releases its interpreter lock in most long calls; a regular expression that backtracks never does.
_STUCK = """
import os, re, signal, sys
from meshwright.run.data import prepare
from meshwright.run.data.tokenizer import Bytes

def stuck(self, texts):
    os.write(1, b"%d\\n" % os.getpid())
    re.match("(a+)+$", "a" * 99 + "b")

Bytes.encode = stuck
prepare([sys.argv[2]], sys.argv[1], workers=2)
"""


def _open_files(pid: int) -> set[str]:
    folder = f"/proc/{pid}/fd"
    return {os.readlink(f"{folder}/{number}") for number in os.listdir(folder)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no signal follows a parent's death")
@pytest.mark.usefixtures("small_pieces")
def test_workers_and_lock_end_with_a_killed_parent(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 2**20] * 3)
    command = [sys.executable, "-c", _STUCK, str(tmp_path / "t"), str(source)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    workers = {pid: started_at(pid) for pid in sorted({int(parent.stdout.readline()) for _ in range(2)})}
    assert len(workers) == 2
    try:
        lock = str(tmp_path / "t.part/lock")
        assert lock in _open_files(parent.pid)
        assert not any(lock in _open_files(pid) for pid in workers)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        limit = time.monotonic() + 5
        while any(state_of(pid, started) not in ("", "Z") for pid, started in workers.items()):
            assert time.monotonic() < limit, "a worker lives on"
            time.sleep(0.02)
    finally:
        for pid, started in workers.items():
            if state_of(pid, started):
                os.kill(pid, signal.SIGKILL)
    parent.stdout.close()
    assert prepare([source], tmp_path / "t", workers=1) is not None


def test_interrupted_leaves_nothing_at_all(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([write_jsonl(tmp_path / "a.jsonl", ["a"])], tmp_path / "t", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_two_at_once(tmp_path: Path) -> None:
    """A second is refused, or waits; of four that wait, one prepares."""
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])

    def again(done: int, total: int) -> None:
        with pytest.raises(InputError, match="another process is preparing it"):
            prepare([source], tmp_path / "t", workers=1)

    assert prepare([source], tmp_path / "t", workers=1, progress=again) is not None
    made: list[object] = []
    threads = [
        threading.Thread(target=lambda: made.append(prepare([source], tmp_path / "u", workers=1, wait=True)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert sum(one is not None for one in made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "t", "u"]
