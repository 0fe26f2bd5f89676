"""Programs and flags: the only package that reads flags and the environment and that starts processes."""

from launch.at_import.own_packages import check_own_packages
from launch.at_import.quiet_tensorflow import keep_tensorflow_quiet

check_own_packages()
keep_tensorflow_quiet()
