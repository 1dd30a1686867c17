//! Random bytes for names, ports and secrets. Nothing that a run must repeat comes from here.

/// Random bytes of the operating system.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("Linux has random bytes");
    bytes
}
