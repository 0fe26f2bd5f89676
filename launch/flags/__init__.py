"""The flags of training, one file per subject, and the options that are built from them.

task: data, network and batch. step: optimizer, schedule and precision. devices, grid: towers and their devices.
pipeline, slices, branches: towers of several devices. ring, servers: several processes. run: length, files and
reports. Programs as launch.local define their own flags.
"""
