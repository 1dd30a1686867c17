//! (in the making)
#![no_std]
