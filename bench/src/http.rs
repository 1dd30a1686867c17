//! The one HTTP request that the harness makes: a GET of a node's admin page.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest answer that is read, in bytes.
const ANSWER_LEN_MAX: u64 = 4 * 1024 * 1024;

/// The status code and the body of a page.
pub fn get(addr: SocketAddr, path: &str, limit: Duration) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_LEN_MAX).read_to_string(&mut answer)?;
    parse(&answer).ok_or_else(|| {
        let text = format!("{addr}{path} did not answer in HTTP");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

fn parse(answer: &str) -> Option<(u16, String)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some((code, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn an_answer_is_split_into_code_and_body() {
        let answer = "HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\nno leader\r\n\r\nyet";
        assert_eq!(parse(answer), Some((503, "no leader\r\n\r\nyet".into())));
        assert_eq!(parse("SSH-2.0-x\r\n\r\n"), None);
    }
}
