"""Programs and flags: the only package that reads flags and the environment and that starts processes."""

from launch.at_import.closed_streams import open_closed_streams
from launch.at_import.ending_signals import end_at_early_signals
from launch.at_import.running_program import running_program

open_closed_streams()
# Before the other imports, which take longer: until this call a signal ends the process without our message.
end_at_early_signals(running_program())

from launch.at_import.frozen_objects import freeze_imported_objects  # noqa: E402
from launch.at_import.keras_backend import check_keras_backend  # noqa: E402
from launch.at_import.own_packages import check_own_packages  # noqa: E402
from launch.at_import.plots_when_used import import_plots_when_used  # noqa: E402
from launch.at_import.quiet_tensorflow import keep_tensorflow_quiet  # noqa: E402

check_own_packages()
check_keras_backend()
# Chooses TensorFlow's kernels before TensorFlow is imported, but after `check_own_packages`: another package might
# be found as `towers`.
import towers  # noqa: E402, F401

freeze_imported_objects()
keep_tensorflow_quiet()
import_plots_when_used()
