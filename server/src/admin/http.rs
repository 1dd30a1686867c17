//! HTTP for operators, on one thread of its own with a tokio runtime: `/metrics`, `/livez`,
//! `/readyz`. Read-only. It shares nothing with the cores but atomic cells, so neither can make
//! the other wait. Connections are limited in number and in silence.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use super::metrics::Metrics;
use super::render::{self, Recent};
use crate::error::NodeError;

/// Connections at one time; further ones are closed at once.
const CONNECTIONS_MAX: usize = 64;
/// A connection that sent nothing for so long is closed.
const IDLE: Duration = Duration::from_mins(1);
/// Between two looks at the cores' reports.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// Between two samples of the distributions, in looks.
const SAMPLE_LOOKS: u32 = 15;
/// After a failed accept, as when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

struct Shared {
    metrics: Arc<Metrics>,
    recent: Mutex<Recent>,
}

/// Binds the address and serves it until the process ends. Returns the bound address.
pub fn start(address: SocketAddr, metrics: Arc<Metrics>) -> Result<SocketAddr, NodeError> {
    let listen = |source| NodeError::Listen { key: "admin-listen", address, source };
    let listener = TcpListener::bind(address).map_err(listen)?;
    listener.set_nonblocking(true).map_err(listen)?;
    let bound = listener.local_addr().map_err(listen)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(NodeError::internal)?;
    let shared = Arc::new(Shared { metrics, recent: Mutex::default() });
    let serve = move || {
        if let Err(error) = runtime.block_on(serve(listener, shared)) {
            tracing::error!("admin-listen {bound}: {error}");
        }
    };
    std::thread::Builder::new()
        .name("admin".to_owned())
        .spawn(serve)
        .map_err(NodeError::internal)?;
    Ok(bound)
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    tokio::spawn(sample(shared.clone()));
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(shared);
    axum::serve(Limited { listener, open: Arc::new(()) }, router).await
}

async fn sample(shared: Arc<Shared>) {
    let mut interval = tokio::time::interval(HEALTH_INTERVAL);
    for look in 0_u32.. {
        interval.tick().await;
        shared.metrics.health().sample();
        if look % SAMPLE_LOOKS == 0 {
            recent(&shared).sample(&shared.metrics);
        }
    }
}

fn recent(shared: &Shared) -> std::sync::MutexGuard<'_, Recent> {
    shared.recent.lock().expect("one thread uses it, and a panic ends that")
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let page = render::page(&shared.metrics, &recent(&shared));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page)
}

/// Alive is a process that answers: an executor without progress ends it (`watchdog-ms`).
async fn livez() -> &'static str {
    "ok\n"
}

async fn readyz(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let reasons = shared.metrics.health().unready();
    if reasons.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, reasons)
    }
}

/// Accepts no more than `CONNECTIONS_MAX` at a time. Every open connection shares `open`.
struct Limited {
    listener: tokio::net::TcpListener,
    open: Arc<()>,
}

impl axum::serve::Listener for Limited {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) if Arc::strong_count(&self.open) <= CONNECTIONS_MAX => {
                    let idle = Box::pin(sleep(IDLE));
                    return (Connection { stream, idle, _open: self.open.clone() }, address);
                }
                Ok(_) => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A stream whose reads fail once it was silent for `IDLE`.
struct Connection {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _open: Arc<()>,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.idle.as_mut().reset(Instant::now() + IDLE);
            return Poll::Ready(result);
        }
        self.idle.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::admin::{Phase, ShardReport};
    use leasehold_protocol::ids::NodeId;

    fn ask(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    fn server() -> (SocketAddr, Arc<Metrics>) {
        let metrics = Metrics::new(1, 1);
        (start("127.0.0.1:0".parse().unwrap(), metrics.clone()).unwrap(), metrics)
    }

    #[test]
    fn a_node_lives_from_the_start_and_is_ready_when_its_shards_are() {
        let (address, metrics) = server();
        assert!(ask(address, "/livez").starts_with("HTTP/1.1 200"));
        let reply = ask(address, "/readyz");
        assert!(reply.starts_with("HTTP/1.1 503") && reply.contains("starting"), "{reply}");
        metrics.health().enter(Phase::Running);
        let leader = Some(NodeId(1));
        metrics.health().report(0, &ShardReport { leader, begun: true, ..ShardReport::default() });
        let reply = ask(address, "/readyz");
        assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("ready\n"), "{reply}");
        assert!(ask(address, "/metrics").contains("leasehold_build_info{version="));
        assert!(ask(address, "/nothing").starts_with("HTTP/1.1 404"));
    }

    #[test]
    fn a_second_server_on_the_address_is_refused() {
        let (address, metrics) = server();
        let error = start(address, metrics).unwrap_err().to_string();
        assert!(error.contains(&format!("admin-listen {address}")), "{error}");
        assert!(error.contains("another process listens there"), "{error}");
    }

    #[test]
    fn connections_beyond_the_limit_are_closed_and_the_others_are_served() {
        let (address, _metrics) = server();
        let held: Vec<_> = (0..CONNECTIONS_MAX)
            .map(|_| {
                let mut stream = TcpStream::connect(address).unwrap();
                write!(stream, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
                let mut reply = [0; 12];
                stream.read_exact(&mut reply).unwrap();
                assert_eq!(&reply, b"HTTP/1.1 200");
                stream
            })
            .collect();
        let mut extra = TcpStream::connect(address).unwrap();
        // Closed without a reply: the end of the stream, or a reset, but long before `IDLE`.
        extra.set_read_timeout(Some(IDLE / 4)).unwrap();
        let end = extra.read(&mut [0; 1]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "{end:?}");
        drop(held);
        while !TcpStream::connect(address).is_ok_and(|mut stream| {
            let asked = write!(stream, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n");
            asked.is_ok() && matches!(stream.read(&mut [0; 1]), Ok(1))
        }) {}
    }
}
