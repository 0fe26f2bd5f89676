"""The only room that reads flags and the environment and starts processes."""

from launch.quiet_start import import_tensorflow_quietly

import_tensorflow_quietly()
