//! The accepting side: one connection's handshake, then its requests.
//!
//! Requests are begun in the order they came, so that entries reach a group in the order of its
//! log; answers go out as they are ready. Reading stops while too many are under way.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use leasehold_protocol::codec;
use leasehold_protocol::error::ErrorCode;
use leasehold_protocol::frame;
use leasehold_protocol::ids::NodeId;
use leasehold_protocol::peer::{self, PeerIdentity, PeerRefusal};
use openraft::AsyncRuntime;
use openraft::async_runtime::Select2;

use super::handshake::{self, Wire};
use super::identity::PeerInfo;
use super::link::{self, Inbox, Outbox, Shut};
use super::{HandshakeError, Peers};
use crate::env::{Clock, Env, Net};
use crate::raft::message::RaftMessage;
use crate::raft::signal::Signal;

/// Longest time of an accepted connection's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections of this core that proved the secret, at most; more are closed at once. Each core of
/// each peer makes four, and as many again while they are made anew.
const SERVED_MAX: usize = 1024;
/// Connections that shake hands, at most. One more ends the oldest, so that strangers who only
/// connect keep no peer out: a peer needs a few round trips.
const GREETING_MAX: usize = 64;
/// Most requests of one connection that are worked on.
const UNDER_WAY_MAX: usize = 1024;
/// A connection on which nothing came for so long is asked for a sign of life, and after twice
/// that time closed.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// The requests of one connection that are worked on.
#[derive(Default)]
struct UnderWay {
    count: Cell<usize>,
    fewer: Signal,
}

impl<E: Env> Peers<E> {
    /// Serves one accepted connection until it ends.
    pub async fn serve(
        self: &Rc<Self>,
        mut reader: <E::Net as Net>::Reader,
        mut writer: <E::Net as Net>::Writer,
    ) {
        let greeted = self.greeted(&mut reader, &mut writer).await;
        let Some((info, decoder)) = greeted else { return };
        if self.served.get() >= SERVED_MAX {
            tracing::warn!(peer = info.node().0, "too many peer connections: closed");
            return;
        }
        self.served.set(self.served.get() + 1);
        self.serve_one(&info, Inbox::new(reader, self.clock.clone(), decoder), writer).await;
        self.served.set(self.served.get() - 1);
    }

    /// Shakes hands, as long as that may take and as long as there is room for it.
    async fn greeted(
        &self,
        reader: &mut <E::Net as Net>::Reader,
        writer: &mut <E::Net as Net>::Writer,
    ) -> Option<(PeerInfo, frame::Decoder)> {
        let ended = Rc::new(Signal::default());
        self.greeting.borrow_mut().push_back(ended.clone());
        let crowded = self.greeting.borrow().len() > GREETING_MAX;
        let oldest = crowded.then(|| self.greeting.borrow_mut().pop_front()).flatten();
        if let Some(oldest) = oldest {
            oldest.raise();
        }
        let greet = E::Rt::timeout(HANDSHAKE_TIMEOUT, self.greet(reader, writer));
        let greeted = E::Rt::select2(ended.since(0), greet).await;
        self.greeting.borrow_mut().retain(|other| !Rc::ptr_eq(other, &ended));
        match greeted {
            Select2::Second(Ok(Ok(greeted))) => Some(greeted),
            Select2::Second(Ok(Err(error))) => {
                let node = match &error {
                    HandshakeError::Refused { node, .. } => *node,
                    _ => NodeId(0),
                };
                self.say(node, &error);
                None
            }
            Select2::First(()) | Select2::Second(Err(_)) => None,
        }
    }

    async fn serve_one(
        self: &Rc<Self>,
        info: &PeerInfo,
        inbox: Inbox<E>,
        writer: <E::Net as Net>::Writer,
    ) {
        self.meet(&info.identity);
        let outbox = Rc::new(Outbox::default());
        outbox.heard_at(self.clock.now());
        self.connected.borrow_mut().add(&info.identity, outbox.clone());
        drop(E::Rt::spawn(link::write_loop::<E>(outbox.clone(), writer, |_| {})));
        self.requests(info, &outbox, inbox).await;
        outbox.close();
    }

    async fn greet(
        &self,
        reader: &mut <E::Net as Net>::Reader,
        writer: &mut <E::Net as Net>::Writer,
    ) -> Result<(PeerInfo, frame::Decoder), HandshakeError> {
        let me = self.identity.borrow().clone();
        let mut wire = Wire::new(reader, writer);
        let judge = |other: &PeerIdentity| self.judge(other);
        let info = handshake::accept(&mut wire, &me, Self::challenge(), &judge).await?;
        if me.cluster != self.identity.borrow().cluster {
            return Err(HandshakeError::Broken("this node joined a cluster meanwhile".to_owned()));
        }
        Ok((info, std::mem::replace(&mut wire.decoder, frame::Decoder::new(0))))
    }

    /// A peer proved who it is: its addresses are news, and it can be reached again.
    pub(super) fn meet(&self, identity: &PeerIdentity) {
        let mut book = self.book.borrow_mut();
        let known = book.entry(identity.node).or_default();
        known.client_addr = Some(identity.client_addr.clone());
        if !identity.peer_addr.is_empty() {
            known.advertised = Some(identity.peer_addr.clone());
        }
        drop(book);
        let lanes = self.lanes.borrow();
        let same_node = lanes.iter().filter(|((node, _), _)| *node == identity.node);
        same_node.for_each(|(_, lane)| lane.heard());
    }

    async fn requests(self: &Rc<Self>, info: &PeerInfo, outbox: &Rc<Outbox>, mut inbox: Inbox<E>) {
        let under_way = Rc::new(UnderWay::default());
        loop {
            loop {
                let frame = match inbox.decoder.next() {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(error) => {
                        let peer = info.node().0;
                        tracing::warn!(peer, "peer connection closed: {error}");
                        return;
                    }
                };
                self.begin(info, outbox, &under_way, frame);
            }
            while under_way.count.get() >= UNDER_WAY_MAX {
                let version = under_way.fewer.version();
                under_way.fewer.since(version).await;
            }
            if !self.read_or_probe(outbox, &mut inbox).await {
                return;
            }
        }
    }

    /// Reads; a silent peer is asked whether it is there. False at the connection's end.
    async fn read_or_probe(&self, outbox: &Outbox, inbox: &mut Inbox<E>) -> bool {
        loop {
            match E::Rt::timeout(IDLE_MAX, inbox.read(outbox)).await {
                Ok(more) => return more,
                Err(_) if self.clock.now().since(outbox.heard()) > 2 * IDLE_MAX => return false,
                Err(_) => outbox.ping(),
            }
        }
    }

    /// Begins one request; what is not answered at once is awaited by a task of its own.
    fn begin(
        self: &Rc<Self>,
        info: &PeerInfo,
        outbox: &Rc<Outbox>,
        under_way: &Rc<UnderWay>,
        frame: frame::Frame<'_>,
    ) {
        let id = frame.id.0;
        match frame.kind {
            peer::PING => return outbox.pong(id),
            peer::REPLY => return,
            _ => {}
        }
        let mut answer = match self.dispatch(info, frame.kind, frame.body) {
            Ok(answer) => answer,
            Err(code) => return reply(outbox, id, Err(code)),
        };
        if let Some(answer) = (&mut answer).now_or_never() {
            return reply(outbox, id, answer);
        }
        under_way.count.set(under_way.count.get() + 1);
        let (outbox, under_way) = (outbox.clone(), under_way.clone());
        drop(E::Rt::spawn(async move {
            reply(&outbox, id, answer.await);
            under_way.count.set(under_way.count.get() - 1);
            under_way.fewer.raise();
        }));
    }

    /// Finds who answers a request. Its first poll hands it over, so requests that are polled in
    /// order are handed over in order. Also for requests that another core received.
    pub fn dispatch(
        &self,
        from: &PeerInfo,
        kind: u8,
        body: &[u8],
    ) -> Result<futures_util::future::LocalBoxFuture<'static, Result<Vec<u8>, ErrorCode>>, ErrorCode>
    {
        if !from.joined && !peer::is_birth(kind) {
            return Err(ErrorCode::NOT_READY);
        }
        if peer::is_raft(kind) {
            let message = RaftMessage::decode(kind, body).ok_or(ErrorCode::MALFORMED)?;
            let group = self.groups.borrow().get(&message.shard()).and_then(Weak::upgrade);
            if let Some(group) = group {
                return Ok(group.handle(from, message));
            }
        }
        let service = self.service.borrow().clone();
        Ok(service.ok_or(ErrorCode::NOT_READY)?.handle(from, kind, body))
    }
}

fn reply(outbox: &Outbox, id: u64, answer: Result<Vec<u8>, ErrorCode>) {
    let pushed = match answer {
        Ok(body) => outbox.push(peer::REPLY, id, None, |out| out.extend_from_slice(&body)),
        Err(code) => refuse(outbox, id, code),
    };
    let pushed = match pushed {
        Err(Shut::TooLarge) => refuse(outbox, id, ErrorCode::FRAME_TOO_LARGE),
        pushed => pushed,
    };
    // A peer that does not read its answers loses its connection.
    if pushed.is_err() {
        outbox.close();
    }
}

fn refuse(outbox: &Outbox, id: u64, code: ErrorCode) -> Result<(), Shut> {
    let refusal = PeerRefusal { code, message: code.text().to_owned() };
    outbox.push(peer::ERROR, id, None, |out| codec::encode_into(&refusal, out))
}
