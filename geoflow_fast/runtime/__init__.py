"""The ground that the rest of the package stands on: argument checks, files, progress, interrupts, devices."""
