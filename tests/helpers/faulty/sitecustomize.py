"""Run by every interpreter that has this directory on PYTHONPATH: arms the fault that the environment names."""

import os

if "ENGINE_CLIENT_TEST_FAULT" in os.environ:
    from helpers.crash_points import arm_here

    arm_here()
