"""Compiles the C of the package; all else stands in pyproject.toml.

Each library is one text: its files one after the other, so that all of them are optimised together. They are loaded with
ctypes (`meshwright.base.native.packaged`), not imported. C that is generated while a program runs, and loops over
gradients that want the widest vectors of the processor at hand, are compiled then.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
# library -> its files, in the order in which they need each other
LIBRARIES = {
    "meshwright.traces.reading.scanner._scanner": ("texts.c", "numbers.c", "event.c", "scanner.c"),
    "meshwright.traces.rank._nesting": ("nesting.c",),
    "meshwright.watcher.values._hooks": (
        "tensor.c", "same.c", "call.c", "object.c", "locals.c", "words.c", "hook.c", "steps.c",
    ),
}  # fmt: skip
# As in meshwright/base/native.py: sums are rounded as NumPy and PyTorch round them.
FLAGS = ["-std=gnu11", "-O3", "-fwrapv", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-w"]


class Libraries(build_ext):
    """Compiles each library as a shared object; where there is no compiler, the package works without them."""

    def build_extension(self, ext: Extension) -> None:
        text = Path(self.build_temp) / f"{ext.name}.c"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join((HERE / source).read_text() for source in ext.sources))
        objects = self.compiler.compile(
            [str(text)], output_dir=self.build_temp, include_dirs=self.compiler.include_dirs, extra_postargs=FLAGS
        )
        made = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(made), exist_ok=True)
        self.compiler.link_shared_object(objects, made, libraries=["m"])


def _sources(name: str, files: tuple[str, ...]) -> list[str]:
    folder = Path("src", *name.split(".")[:-1])
    return [str(folder / file) for file in files]


setup(
    ext_modules=[Extension(name, _sources(name, files), optional=True) for name, files in LIBRARIES.items()],
    cmdclass={"build_ext": Libraries},
)
