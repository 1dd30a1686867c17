//! What operators see: metrics and health, over HTTP (DESIGN §3).
//!
//! Owns the table of metrics, the cells that cores write, and one thread that reads them. It never
//! takes a lock that a core could want, and nothing here is on the path of a request.

mod health;
mod histogram;
mod http;
mod metrics;
mod render;

pub use self::health::{BEHIND_MAX, Health, Phase, ShardReport};
pub use self::http::start;
pub use self::metrics::{CoreHandle, CoreMetrics, Counter, Distribution, Gauge, Metrics, Spec};
pub(crate) use self::render::catalogue;
