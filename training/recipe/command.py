"""`training evaluate`: the exact test score of a run's newest checkpoint, or of a file of plain weights."""

from __future__ import annotations

from pathlib import Path

from lockstep.training import config as configuration
from lockstep.training import models
from lockstep.training.checkpoint import weights
from lockstep.training.config import Config, settings
from lockstep.training.contract import UserError, to_stderr
from lockstep.training.data import sources
from lockstep.training.data.augment import check_settings
from lockstep.training.data.making import prepare
from lockstep.training.data.shards import Manifest, verify
from lockstep.training.models.arithmetic import real_type
from lockstep.training.observe.rundir import recipe_of
from lockstep.training.parallel.exchange import failing_together, waiting_for_all
from lockstep.training.parallel.world import World
from lockstep.training.recipe.evaluate import Evaluator, Score


def config_of(
    target: Path, recipe: str | None, assignments: list[str], trust_model: bool = False
) -> tuple[Config, str | None]:
    """(the config that RUN, a run directory, or FILE, weights of `recipe`, belongs to; the checksum of RUN's data).

    Raises:
        UserError: there is no such run; or it names a model, or a function that makes its data, of somebody's own, which
            runs code, without `trust_model`.
    """
    if not target.exists():
        raise UserError(f"{target}: there is no such run or file")
    if target.is_dir():
        if recipe:
            raise UserError(f"{target} is a run, and its config is used: remove --recipe")
        run = recipe_of(target, "evaluating it")
        config = _elsewhere(run["config"], assignments, target)
        model = config.model
        if not trust_model and not models.ours(model):
            raise UserError(
                f"{target} names the model {model}, and importing it runs code: add --trust-model if you trust the author of the run"
            )
        source = config.data.source
        if not trust_model and not sources.ours(source) and config.data.shards is None:
            raise UserError(
                f"{target} names the source {source}, and reading it runs code: add --trust-model if you trust the author of the run, or "
                "name its shards with --set data.shards=DIR"
            )
        return config, run["data"].get("checksum")
    if recipe is None:
        raise UserError(f"{target}: name the recipe that these weights belong to with --recipe")
    return configuration.load(recipe, assignments), None


def _elsewhere(config: Config, assignments: list[str], target: Path) -> Config:
    """The run's config where its data lies elsewhere now. Raises `UserError` for settings that make it another run."""
    values = settings.override(configuration.to_dict(config), Config, assignments)
    changed = configuration.from_dict(values, f"{target} with --set")
    if different := configuration.differences(config, changed):
        raise UserError(
            f"{target} was trained with other settings ({'; '.join(different)}): --set may change what a resume may change, such as "
            "data.root and evaluate.batch_size"
        )
    return changed


def score_target(target: Path, config: Config, checksum: str | None, world: World) -> Score:
    """Scores RUN or FILE on the test split. Collective. Raises `UserError`."""

    def warn(message: str) -> None:
        to_stderr(f"warning: {message}")

    with failing_together(world):
        tensors = weights.from_run(target, warn)[0] if target.is_dir() else weights.read(target)
    with waiting_for_all(world, "prepare the data", config.data.prepare_timeout, config.collective_timeout):
        manifest = Manifest.read(prepare(config.data))
    with failing_together(world):
        check_settings(config, manifest.shape)
        if checksum is not None and checksum != manifest.checksum:
            raise UserError(f"{manifest.directory} holds other data than {target} was trained on: restore it")
        model = models.build(config.model, config.model_options, len(manifest.classes), manifest.shape)
        weights.assign(model, tensors, target)
        model.to(device=world.device, dtype=real_type(config.precision))
        if config.data.verify:
            verify(manifest, ("test",), world.local_rank, world.local_size)
    with failing_together(world):
        evaluator = Evaluator(config, world, manifest, verified=True)
    return evaluator.score(model.eval())
