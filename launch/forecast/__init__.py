"""What `launch.memory` prints: bytes per device for each mode."""
