//! Files: the production side of the `Disk` seam (`linux`), and a simulated one (`sim`) that can
//! lose power, fail and fill up.

mod helper;
pub mod linux;
pub mod sigbus;
pub mod sim;
