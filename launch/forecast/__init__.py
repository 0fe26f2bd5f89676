"""What `launch.memory` prints: bytes a device for each mode."""
