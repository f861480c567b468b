"""Programs under `meshwright watch` see the same Python as without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run


def plain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def watched(meshwright: Run, tmp_path: Path) -> Run:
    """Watch a program of this text."""

    def run(text: str, *words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(text)
        return meshwright("watch", "program.py", *words, timeout=60)

    return run


def test_threads_that_outlive_the_script_are_watched(watched: Run) -> None:
    done = watched(
        "import threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work():\n    time.sleep(0.2)\n    return inner()\n"
        "def inner():\n    return 1\n"
        "ThreadPoolExecutor(1).submit(inner)  # its thread ends only when it is told to\n"
        "threading.Thread(target=work).start()\n"
        "raise ValueError('first')\n"
    )
    assert done.returncode == 1
    told = [line.split()[-3:-1] for line in done.stderr.splitlines() if "] run " in line or "]   run " in line]
    assert [name for _, name in told].count("inner") == 2
    assert "end work" in done.stderr
    assert done.stderr.index("ValueError: first") < done.stderr.index("end work")


def test_waiting_for_threads_can_be_interrupted(watched: Run, tmp_path: Path) -> None:
    done = watched(
        "import os, signal, threading, time\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    for _ in range(60):\n"  # again: a signal just before Python waits for a lock is heard after it
        "        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(5)\n"
        "threading.Thread(target=work).start()\n"
    )
    assert done.returncode == plain(tmp_path, "program.py").returncode
    assert "run work" in done.stderr
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "meshwright" not in done.stderr


def test_the_watch_has_no_thread_that_the_program_sees(watched: Run) -> None:
    done = watched(
        "import _thread, threading, time\n"
        "def work():\n    pass\n"
        "thread = threading.Thread(target=work)\nthread.start()\n"
        "while threading.active_count() > 1:\n    time.sleep(0.01)\n"
        "_thread.start_new_thread(work, ())\ntime.sleep(0.1)\n"
        "print(threading.enumerate() == [threading.main_thread()])\n"
    )
    assert done.stdout == "True\n"
    assert "[Dummy-1] run work" in done.stderr


NAMES = """
import os, sys
def names():
    return __file__, names.__code__.co_filename, sys.argv, sys.path[0]
print(names(), __cached__, __annotations__, __package__, sorted(globals()))
os.chdir("/")
print(os.path.exists(__file__))
if "fail" in sys.argv:
    raise ValueError("as asked")
"""


@pytest.mark.parametrize("words", [["names.py"], ["./names.py", "fail"], ["linked.py"], ["-m", "names"]])
def test_names_of_a_program_are_what_python_says(meshwright: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/real.py").write_text(NAMES)
    (tmp_path / "names.py").write_text(NAMES)
    (tmp_path / "linked.py").symlink_to("sub/real.py")
    alone = plain(tmp_path, *words)
    watched = meshwright("watch", "-o", "run", *words)
    assert watched.stdout.replace(".pyc", "") == alone.stdout.replace(".pyc", "")
    assert (watched.returncode, watched.stderr) == (alone.returncode, alone.stderr)
    assert meshwright("watch", *words).stderr.count(" run names  names.py:3\n") == ("linked.py" not in words)


def test_exceptions_of_any_kind_show_the_programs_frames_alone(watched: Run, tmp_path: Path) -> None:
    done = watched("class Stop(BaseException):\n    pass\n\nraise Stop('bye')\n")
    alone = plain(tmp_path, "program.py")
    assert (done.returncode, done.stderr) == (alone.returncode, alone.stderr)


def test_the_programs_own_excepthook_and_exit_text(watched: Run) -> None:
    hook = "import sys\nsys.excepthook = lambda *_: print('hooked')\nraise ValueError\n"
    assert watched(hook).stdout == "hooked\n"
    done = watched("import sys\nsys.exit('not today')\n")
    assert (done.returncode, done.stderr) == (1, "not today\n")


OPTIONAL = """
import sys
try:
    import helper
    print(helper.double(2))
except Exception as error:
    print("seen by the program:", error)
if "fail" in sys.argv:
    sys.exit(7)
"""


def test_a_wrong_target_does_not_reach_the_programs_import(watched: Run, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    for word, code in (("pass", 2), ("fail", 7)):
        done = watched(OPTIONAL, "-t", "helper:tripel", "--", word)
        assert (done.returncode, done.stdout) == (code, "4\n")
        assert done.stderr == "error: target: there is no 'tripel' in 'helper' (valid: double)\n"


def test_a_module_that_is_imported_again_is_watched_again(watched: Run, tmp_path: Path) -> None:
    program = "import importlib, helper\nhelper.double(1)\nimportlib.reload(helper)\nhelper.double(1)\nhelper.kept()\n"
    kept = "if 'kept' not in globals():\n    def kept():\n        pass\n"  # is the old one then, and watched already
    (tmp_path / "helper.py").write_text(f"def double(x):\n    return 2 * x\n{kept}")
    done = watched(program, "-t", "helper", "-t", "helper:double")
    assert (done.returncode, done.stderr.count("run double"), done.stderr.count("end double")) == (0, 2, 2)
    assert done.stderr.count("run kept") == done.stderr.count("end kept") == 1


FAMILY = """
import json
from json import JSONDecoder as Far

class A:
    def step(self):
        return 1

class B(A):
    pass

class C(A):
    def step(self):
        return 2

class D(B, C):
    pass

class E(Far):
    def encode(self):
        return 3

class F(json.decoder.JSONDecoder):
    pass

one = lambda x=1: x; two = lambda x=2: x

if __name__ == "__main__":
    A().step(), D().step(), one(), two()
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [("B.step", "A.step  family.py:6"), ("D.step", "C.step  family.py:13"), ("two", "<lambda>  x=2  family.py:26")],
)
def test_inherited_methods_and_lambdas_of_the_script(meshwright: Run, tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    for words in (["family.py"], ["-m", "family"]):
        done = meshwright("watch", *words, "-t", f"family:{name}", "--wrapper", "plain")
        runs = [one.partition(" run ")[2] for one in done.stderr.splitlines() if " run " in one]
        assert (done.returncode, runs) == (0, [line])
    assert name != "two" or "-> 2" in done.stderr  # of two on one line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("E.decode", "what is imported or inherited is named by its own module (valid: json:JSONDecoder.decode)"),
        ("F.decode", "is named by its own module (valid: json.decoder:JSONDecoder.decode)"),
        (
            "Far",
            "'Far' is not defined in 'family'; what is imported or inherited is named by its own module (valid: json:J",
        ),
        ("E.encde", "'E.encde' is not defined in 'family' (did you mean E.encode?); what is"),
        ("D", "the class 'D' defines no functions itself (valid: B, C, A)"),
        ("G.step", "there is no 'G.step' in 'family'"),
    ],
)
def test_targets_that_the_script_does_not_define(meshwright: Run, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    done = meshwright("watch", "family.py", "-t", f"family:{name}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
