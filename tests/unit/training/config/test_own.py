from __future__ import annotations

import pytest

from lockstep.training.config.own import own_settings
from tests.product import UserError


def test_an_empty_mapping_of_a_script_is_a_setting_that_it_has() -> None:
    script: dict[str, object] = {"options": {}}
    found = own_settings("train", script, {}, ["config.options={depth: 3}"])
    assert found.config == {"options": {"depth": 3}} and script == {"options": {}}
    with pytest.raises(UserError, match="got 3"):
        own_settings("train", script, {}, ["config.options=3"])
