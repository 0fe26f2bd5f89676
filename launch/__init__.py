"""The only room that reads flags and the environment and starts processes."""

from launch.importing.quiet_tensorflow import keep_tensorflow_quiet

keep_tensorflow_quiet()
