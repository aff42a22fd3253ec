"""What the tests take from gymnasium; where it is missing, they are skipped and say so."""

import pytest

REASON = "needs gymnasium: pip install 'fedglimpse[gym]'"
gym = pytest.importorskip("gymnasium", reason=REASON)
check_env = pytest.importorskip("gymnasium.utils.env_checker", reason=REASON).check_env
AutoresetMode = gym.vector.AutoresetMode
SyncVectorEnv = gym.vector.SyncVectorEnv
DictInfoToList = gym.wrappers.vector.DictInfoToList
