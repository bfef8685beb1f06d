"""A pipeline whose versions can be rebuilt: a learner in this process, over topics of a broker."""

import random
import shutil
import threading

from anabranch.config.loader import load_config
from anabranch.learner.assembly import Assembly, learn, rebuild_version
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.loop.training_loop import TrainingLoop
from anabranch.learner.versions.format import Versions

MODEL = """
from torch import nn
def build(width=16, frozen=False):
    model = nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)
    )
    if frozen:
        model[0].requires_grad_(False)
    return model
"""
LEARNING_MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.body = nn.Embedding(8, 4), nn.Sequential(nn.Dropout(0.2), nn.Linear(7, 3))
    def forward(self, x, item):
        return self.body(torch.cat([x, self.items(item)], dim=1))
build = Model
"""
LEARNED = """scale = "standard"
[schema.features.item]
dtype = "string"
encode = {learn = 8, min_count = 2, expire = "30d"}"""
CONFIG = """
name = "audited"
seed = 3
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
[schema]
key = {{name = "user"}}
[schema.features.x]
dtype = "float32"
shape = [3]
[schema.label]
name = "y"
classes = 3
[model]
factory = "audited_model:build"
[learner]
device = "cpu"
batch_size = 8
deterministic = true
replay_ratio = 2.0
status = "127.0.0.1:0"
[replay]
capacity = 200
disk = {{bytes = "1MB"}}
[versions]
publish_every = "0.001ms"
keep = 1000
[checkpoints]
every = "1h"
keep = 100
[gate]
holdout_fraction = 0.1
"""


def events(count, seed=0):
    """Return events without a pattern, by ten users."""
    dice = random.Random(seed)
    return [
        {"x": [dice.gauss(0, 1) for _ in range(3)], "y": dice.randrange(3), "user": f"user-{dice.randrange(10)}"}
        for _ in range(count)
    ]


class Audited:
    """A pipeline, its learner in this process, and rebuilds of its versions."""

    def __init__(self, folder, bootstrap, topic):
        self.path, self.topic, self.bootstrap = folder / "pipeline.toml", topic, bootstrap
        self.path.write_text(CONFIG.format(bootstrap=bootstrap, topic=topic))
        (folder / "audited_model.py").write_text(MODEL)
        self.environment: dict[str, str] = {}

    @property
    def spec(self):
        return load_config(self.path, self.environment).pipeline

    @property
    def versions(self):
        return Versions(self.spec.state_dir / "versions")

    def checkpoints(self, schema):
        return Checkpoints(self.spec.state_dir / "checkpoints", schema, 0)

    def learn(self, monkeypatch, until, checkpoints_at=(), *, killed=False):
        """Learn until step `until`, with a version after each step, and checkpoints after these; then stop in order.

        Each step is a round here. A rebuild takes rounds as long as the settings say, which change no bits.

        With `killed`, the state directory is afterwards as a SIGKILL at that step would have left it.
        """
        stop, build, state_dir = threading.Event(), Assembly.tasks, self.spec.state_dir
        as_killed = state_dir.with_name("killed")
        asked = set[int]()

        def tasks(learner):
            def between():
                parts, steps = learner.parts, learner.loop.state.steps
                parts.publisher._background.wait(_Patience())
                for step in checkpoints_at:
                    if steps >= step and step not in asked:
                        asked.add(step)
                        parts.checkpointer.request()
                        learner.loop.checkpoint_if_due()
                        parts.checkpointer.wait(_Patience())
                if steps >= until and not stop.is_set():
                    if killed:
                        shutil.copytree(state_dir, as_killed)
                    stop.set()

            return (*build(learner), between)

        with monkeypatch.context() as patch:
            patch.setattr(Assembly, "tasks", tasks)
            patch.setattr("anabranch.learner.versions.scores._SHARE", 1)
            patch.setattr(TrainingLoop, "_steps_of_round", lambda _loop: 1)
            learn(self.spec, stop)
        if killed:
            shutil.rmtree(state_dir)
            as_killed.rename(state_dir)

    def rebuild(self, number, keep=None):
        """Rebuild a version to its end."""
        rebuilt = rebuild_version(self.spec, self.versions, self.checkpoints, number, threading.Event(), keep)
        assert rebuilt is not None
        return rebuilt

    def learn_features(self):
        """Let the numbers be scaled, and items be rows of an embedding, by what the stream has had."""
        self.rewrite("shape = [3]", f"shape = [3]\n{LEARNED}")
        self.path.with_name("audited_model.py").write_text(LEARNING_MODEL)

    def rewrite(self, before, after):
        """Change the settings."""
        text = self.path.read_text()
        assert before in text
        self.path.write_text(text.replace(before, after))


class _Patience:
    left = 100.0
