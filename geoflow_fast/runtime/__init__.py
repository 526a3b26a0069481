"""What the rest of the package runs on: argument checks, files, progress, interrupts, devices."""
