//! The handshake of a peer connection: who is there, and both prove the cluster secret.
//!
//! ```text
//! connecting side                                  accepting side
//!   HELLO  identity, challenge        ───────▶
//!                                     ◀───────  WELCOME  identity, challenge, proof
//!   PROOF  proof                      ───────▶
//!                                     ◀───────  READY
//! ```
//!
//! A proof is HMAC-SHA256 under the secret over a label of its side and both sides' whole messages,
//! so over both challenges and both identities; it is compared in constant time. Neither side says
//! more than its identity before the other proved the secret. Every refusal is a code and a
//! sentence, sent to the other side before the connection closes.

use hmac::{Hmac, Mac};
use leasehold_protocol::codec::{self, Body};
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame::{self, Decoder, Header, MAGIC, VERSION_MAX, VERSION_MIN};
use leasehold_protocol::ids::{ClusterId, DiskId, NodeId, RequestId, ShardId};
use leasehold_protocol::peer::{
    self, ADDR_LEN_MAX, HANDSHAKE_BODY_MAX, PeerHello, PeerIdentity, PeerProof, PeerRefusal,
    PeerWelcome,
};
use sha2::Sha256;

use super::identity::{Class, Identity, PeerInfo};
use crate::env::{ByteReader, ByteWriter};

/// Why a connection was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The stream ended or failed.
    #[error("the connection broke off in its handshake: {0}")]
    Broken(String),
    /// The bytes are not a handshake.
    #[error("not a peer of Leasehold: {0}")]
    Malformed(String),
    /// This side refused the other one.
    #[error("refused node {node}: {message} [{code}]")]
    Refused {
        /// Whom.
        node: NodeId,
        /// The code that was sent.
        code: ErrorCode,
        /// What was sent with it.
        message: String,
    },
    /// The other side refused this one.
    #[error("the other side refuses this node: {message} [{code}]")]
    RefusedByPeer {
        /// The code.
        code: ErrorCode,
        /// Its sentence.
        message: String,
    },
}

/// What a side decides about the other one's identity, before any proof is spent on it.
pub(super) type Judge<'a> = &'a dyn Fn(&PeerIdentity) -> Result<(), Refusal>;

/// A refusal: a code and a sentence for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The ends of a stream while they shake hands, and what was read beyond.
pub(super) struct Wire<'a, R, W> {
    pub(super) reader: &'a mut R,
    pub(super) writer: &'a mut W,
    pub(super) decoder: Decoder,
}

impl<'a, R: ByteReader, W: ByteWriter> Wire<'a, R, W> {
    pub(super) fn new(reader: &'a mut R, writer: &'a mut W) -> Self {
        Self { reader, writer, decoder: Decoder::new(HANDSHAKE_BODY_MAX) }
    }

    async fn send<T: Body>(&mut self, kind: u8, body: &T) -> Result<(), HandshakeError> {
        let mut bytes = Vec::new();
        let header = Header::new(kind, RequestId(0));
        codec::encode_frame(header, body, HANDSHAKE_BODY_MAX, &mut bytes)
            .map_err(|error| HandshakeError::Malformed(error.to_string()))?;
        self.write(&bytes).await
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let written = self.writer.write_all(bytes).await;
        written.map_err(|error| HandshakeError::Broken(error.to_string()))
    }

    /// The next frame; a refusal by the other side is an error.
    async fn receive<T: Body>(&mut self, kind: u8) -> Result<T, HandshakeError> {
        let body = self.frame(kind).await?;
        codec::decode(&body).map_err(|error| HandshakeError::Malformed(error.to_string()))
    }

    async fn frame(&mut self, kind: u8) -> Result<Vec<u8>, HandshakeError> {
        let mut bytes = [0; 1024];
        loop {
            let next = self.decoder.next();
            if let Some(frame) = next.map_err(|e| HandshakeError::Malformed(e.to_string()))? {
                return expect(kind, &frame);
            }
            let read = self.reader.read(&mut bytes).await;
            match read.map_err(|error| HandshakeError::Broken(error.to_string()))? {
                0 => return Err(HandshakeError::Broken("the stream ended".to_owned())),
                read => self.decoder.feed(&bytes[..read]),
            }
        }
    }

    /// Tells the other side why; the connection is over.
    async fn refuse(&mut self, node: NodeId, refusal: Refusal) -> HandshakeError {
        let Refusal { code, message } = refusal;
        let body = PeerRefusal { code, message };
        let _broken = self.send(peer::REFUSAL, &body).await;
        HandshakeError::Refused { node, code, message: body.message }
    }
}

fn expect(kind: u8, frame: &frame::Frame<'_>) -> Result<Vec<u8>, HandshakeError> {
    if frame.kind == kind {
        return Ok(frame.body.to_vec());
    }
    if frame.kind != peer::REFUSAL {
        let text = format!("a frame of kind {} where {kind} belongs", frame.kind);
        return Err(HandshakeError::Malformed(text));
    }
    match codec::decode::<PeerRefusal>(frame.body) {
        Ok(PeerRefusal { code, message }) => Err(HandshakeError::RefusedByPeer { code, message }),
        Err(error) => Err(HandshakeError::Malformed(error.to_string())),
    }
}

/// What the connecting side asks for.
pub(super) struct Dial<'a> {
    pub(super) me: &'a Identity,
    pub(super) to: NodeId,
    pub(super) class: Class,
    pub(super) shard: ShardId,
    pub(super) challenge: [u8; 32],
}

/// The connecting side.
pub(super) async fn dial<R: ByteReader, W: ByteWriter>(
    wire: &mut Wire<'_, R, W>,
    dial: Dial<'_>,
    judge: Judge<'_>,
) -> Result<PeerInfo, HandshakeError> {
    let hello = PeerHello {
        magic: MAGIC,
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        lane: dial.class.lane(),
        shard: dial.shard,
        from: dial.me.public(),
        to: dial.to,
        challenge: dial.challenge,
    };
    wire.send(peer::HELLO, &hello).await?;
    let welcome: PeerWelcome = wire.receive(peer::WELCOME).await?;
    let transcript = Transcript::new(&hello, &welcome);
    let node = welcome.from.node;
    let verdict = transcript
        .check(&dial.me.secret, ACCEPTING, &welcome.proof)
        .and_then(|()| check_identity(dial.me, &welcome.from))
        .and_then(|()| check_expected(dial.to, node))
        .and_then(|()| judge(&welcome.from));
    if let Err(refusal) = verdict {
        return Err(wire.refuse(node, refusal).await);
    }
    let proof = transcript.proof(&dial.me.secret, CONNECTING);
    wire.send(peer::PROOF, &PeerProof { proof }).await?;
    wire.frame(peer::READY).await?;
    Ok(info(dial.me, welcome.from, dial.class))
}

/// The accepting side.
pub(super) async fn accept<R: ByteReader, W: ByteWriter>(
    wire: &mut Wire<'_, R, W>,
    me: &Identity,
    challenge: [u8; 32],
    judge: Judge<'_>,
) -> Result<PeerInfo, HandshakeError> {
    let hello: PeerHello = wire.receive(peer::HELLO).await?;
    let node = hello.from.node;
    let class = match check_hello(me, &hello) {
        Ok(class) => class,
        Err(refusal) => return Err(wire.refuse(node, refusal).await),
    };
    let from = me.public();
    let mut welcome = PeerWelcome { version: VERSION_MAX, from, challenge, proof: [0; 32] };
    let transcript = Transcript::new(&hello, &welcome);
    welcome.proof = transcript.proof(&me.secret, ACCEPTING);
    wire.send(peer::WELCOME, &welcome).await?;
    let proof: PeerProof = wire.receive(peer::PROOF).await?;
    let verdict = transcript
        .check(&me.secret, CONNECTING, &proof.proof)
        .and_then(|()| check_identity(me, &hello.from))
        .and_then(|()| judge(&hello.from));
    if let Err(refusal) = verdict {
        return Err(wire.refuse(node, refusal).await);
    }
    let mut ready = Vec::new();
    let header = Header::new(peer::READY, RequestId(0));
    frame::append(header, 0, &mut ready, |_| {})
        .map_err(|error| HandshakeError::Malformed(error.to_string()))?;
    wire.write(&ready).await?;
    Ok(info(me, hello.from, class))
}

fn info(me: &Identity, identity: PeerIdentity, class: Class) -> PeerInfo {
    let joined = identity.cluster == me.cluster && me.cluster != ClusterId::UNKNOWN;
    PeerInfo { identity, class, joined }
}

fn check_hello(me: &Identity, hello: &PeerHello) -> Result<Class, Refusal> {
    if hello.magic != MAGIC {
        return Err(Refusal::new(ErrorCode::MALFORMED, "the hello does not open with the magic"));
    }
    if hello.version_min > VERSION_MAX || hello.version_max < VERSION_MIN {
        let (theirs, theirs_max) = (hello.version_min, hello.version_max);
        let text =
            format!("versions {theirs} to {theirs_max} there, {VERSION_MIN} to {VERSION_MAX} here");
        return Err(Refusal::new(ErrorCode::UNSUPPORTED_VERSION, text));
    }
    check_expected(hello.to, me.node)?;
    Class::of_lane(hello.lane)
        .ok_or_else(|| Refusal::new(ErrorCode::MALFORMED, format!("no lane {}", hello.lane)))
}

fn check_expected(expected: NodeId, actual: NodeId) -> Result<(), Refusal> {
    if expected == actual {
        return Ok(());
    }
    let text = format!("node {expected} was expected at this address, node {actual} is here");
    Err(Refusal::new(ErrorCode::NO_SUCH_NODE, text))
}

fn check_identity(me: &Identity, other: &PeerIdentity) -> Result<(), Refusal> {
    let known = |cluster| cluster != ClusterId::UNKNOWN;
    if known(me.cluster) && known(other.cluster) && me.cluster != other.cluster {
        let text = format!("cluster {} there, cluster {} here", other.cluster, me.cluster);
        return Err(Refusal::new(ErrorCode::WRONG_CLUSTER, text));
    }
    if other.disk == DiskId::UNKNOWN || other.node == NodeId(0) {
        return Err(Refusal::new(ErrorCode::MALFORMED, "a peer has a node id and a disk id"));
    }
    if other.disk == me.disk {
        let text = format!("the data directory {} is this node's own: a copy of it", me.disk);
        return Err(Refusal::new(ErrorCode::FOREIGN_DISK, text));
    }
    if other.node == me.node {
        let text = format!("node id {} is this node's own", me.node);
        return Err(Refusal::new(ErrorCode::FOREIGN_DISK, text));
    }
    if other.peer_addr.len() > ADDR_LEN_MAX || other.client_addr.len() > ADDR_LEN_MAX {
        return Err(Refusal::new(ErrorCode::MALFORMED, "an address is too long"));
    }
    Ok(())
}

const ACCEPTING: &[u8] = b"leasehold peer, accepting side";
const CONNECTING: &[u8] = b"leasehold peer, connecting side";

/// Both sides' messages, as both sides have them.
struct Transcript {
    hello: Vec<u8>,
    welcome: Vec<u8>,
}

impl Transcript {
    fn new(hello: &PeerHello, welcome: &PeerWelcome) -> Self {
        let unproved = PeerWelcome { proof: [0; 32], ..welcome.clone() };
        Self { hello: codec::encode(hello), welcome: codec::encode(&unproved) }
    }

    fn mac(&self, secret: &[u8], side: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key of any length will do");
        for part in [side, &self.hello, &self.welcome] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn proof(&self, secret: &[u8], side: &[u8]) -> [u8; 32] {
        self.mac(secret, side).finalize().into_bytes().into()
    }

    fn check(&self, secret: &[u8], side: &[u8], proof: &[u8]) -> Result<(), Refusal> {
        self.mac(secret, side)
            .verify_slice(proof)
            .map_err(|_| Refusal::new(ErrorCode::AUTH_FAILED, "the cluster secret was not proved"))
    }
}
