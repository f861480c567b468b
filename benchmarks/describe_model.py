"""How long it takes to know a model: meshwright against transformers on the meta device, in one run.

Both start from the same config and count parameters; transformers builds every module to do so. Times are CPU
seconds of a fresh process each, imports included, because that is what a user waits for.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

MODELS = ("gpt2", "llama3-70b", "llama3.1-405b", "deepseek-v3")
OURS = "from meshwright.models import Model; print(Model.preset({name!r}).parameters)"
PEER = """
import json, torch, transformers
config = json.loads({config!r})
with torch.device("meta"):
    module = transformers.{architecture}(transformers.AutoConfig.for_model(**config))
print(sum(p.numel() for p in module.parameters()))
"""


def timed(code: str) -> tuple[int, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return int(done.stdout.split()[-1]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    from meshwright.models import presets

    print(f"{'model':15} {'parameters':>17} {'transformers':>13} {'meshwright':>11} {'ratio':>7}")
    for name in MODELS:
        preset = presets()[name]
        count, ours = timed(OURS.format(name=name))
        expected, peer = timed(PEER.format(config=json.dumps(preset.config), architecture=preset.architecture))
        assert count == expected, f"{name}: {count} != {expected}"
        print(f"{name:15} {count:17,} {peer:11.2f} s {ours:9.2f} s {peer / ours:6.0f}x")


if __name__ == "__main__":
    main()
