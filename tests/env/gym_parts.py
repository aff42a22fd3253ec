"""What the tests take from gymnasium; where it is missing, they are skipped and say so."""

import pytest

WHY = "needs gymnasium: pip install 'fedglimpse[gym]'"
gym = pytest.importorskip("gymnasium", reason=WHY)
check_env = pytest.importorskip("gymnasium.utils.env_checker", reason=WHY).check_env
AutoresetMode, SyncVectorEnv = gym.vector.AutoresetMode, gym.vector.SyncVectorEnv
DictInfoToList = gym.wrappers.vector.DictInfoToList
