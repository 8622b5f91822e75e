"""`training evaluate`: the exact test score of a run's newest checkpoint, or of a file of plain weights."""

from __future__ import annotations

from pathlib import Path

from training import config as configuration
from training import models, weights
from training.contract import UserError
from training.data.shards import Manifest, prepare
from training.evaluate import Evaluator, Score
from training.rundir import read_run
from training.setup import together
from training.step import real_type
from training.world import World


def score_target(target: Path, recipe: str | None, assignments: list[str], world: World) -> Score:
    """Scores RUN (a run directory) or FILE (weights, with the recipe they belong to). Collective. Raises `UserError`."""
    with together(world):
        if not target.exists():
            raise UserError(f"{target}: there is no such run or file")
        if target.is_dir():
            if recipe or assignments:
                raise UserError(f"{target} is a run, which has its own config: leave out --recipe and --set")
            config = read_run(target)["config"]
            tensors, _ = weights.from_run(target)
        elif recipe is None:
            raise UserError(f"{target}: name the recipe that these weights belong to with --recipe")
        else:
            config = configuration.load(recipe, assignments)
            tensors = weights.read(target)
        manifest = Manifest.read(prepare(config.data))
        model = models.build(config.model, config.model_options, len(manifest.classes))
        own = model.state_dict()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise UserError(f"{target} does not fit model {config.model} with {config.model_options}")
        model.load_state_dict(tensors)
        model.to(device=world.device, dtype=real_type(config.precision))
        evaluator = Evaluator(config, world, manifest)
    score = evaluator.score(model, {})
    assert score is not None
    return score
