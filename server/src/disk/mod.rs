//! Files: the production side of the `Disk` seam, and a simulated one.
