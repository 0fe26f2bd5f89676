"""Programs and flags: the only package that reads flags and the environment and that starts processes."""

from launch.at_import.ending_signals import end_at_early_signals
from launch.at_import.fast_kernels import use_fast_kernels
from launch.at_import.own_packages import check_own_packages, running_program
from launch.at_import.plots_when_used import import_plots_when_used
from launch.at_import.quiet_tensorflow import keep_tensorflow_quiet

end_at_early_signals(running_program())
check_own_packages()
use_fast_kernels()
keep_tensorflow_quiet()
import_plots_when_used()
