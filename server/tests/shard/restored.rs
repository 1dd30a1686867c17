//! A restored cluster's shard: nothing is granted before its time, whoever leads; and a backup is
//! read at any node, whole or not at all.

use std::cell::Cell;

use leasehold_core::snapshot::Decoder;
use leasehold_protocol::birth::Restored;
use leasehold_protocol::ids::ClusterId;
use leasehold_protocol::reply::BackupReply;
use leasehold_protocol::request::BackupRequest;

use super::*;

const WAIT_MS: u32 = 5_000;

fn restored() -> Beginning {
    let from = ClusterId([8; 16]);
    let (lease_base, revision_base, quarantine_ms) = (70, 900, WAIT_MS);
    let restored = Restored { from, lease_base, revision_base, quarantine_ms };
    Beginning { token_base: Token(5_000), restored: Some(restored) }
}

/// What a try answers: the token, or why not.
async fn try_acquire(service: &Service, node: u64, lease: LeaseId) -> Result<Token, ErrorCode> {
    let replies = service.command(node, acquire(lease, 1, 0));
    until("an answer to the acquire", || replies.last().is_some()).await;
    match replies.last().expect("just seen") {
        Reply::Outcome(OutcomeReply { outcome: Outcome::Granted(grant), .. }) => Ok(grant.token),
        Reply::Outcome(OutcomeReply { outcome: Outcome::Refused { code, .. }, .. }) => Err(code),
        Reply::Error(error) => Err(error.code),
        other => panic!("{other:?}"),
    }
}

/// Tries until it is granted, and returns the token and the milliseconds that it took.
async fn first_grant(service: &Service, node: u64, lease: LeaseId) -> (Token, u64) {
    let began = SimClock.now();
    loop {
        match try_acquire(service, node, lease).await {
            Ok(token) => return (token, SimClock.now().since(began).as_millis() as u64),
            Err(code) => assert_eq!(code, ErrorCode::QUARANTINED),
        }
        sleep_ms(20).await;
    }
}

#[test]
fn nothing_is_granted_before_the_old_leases_are_over() {
    run(60, async {
        let service = Service::start_with(3, |_| {}, restored()).await;
        let (leader, _) = service.cluster.leader().await;
        let lease = service.open_for(leader, 60_000).await;
        assert_eq!(lease, LeaseId(71));
        let follower = leader % 3 + 1;
        // A follower passes on what the leader says of the rest.
        for node in [follower, leader] {
            let refused = service.command(node, acquire(lease, 1, 0));
            until("a refusal", || refused.last().is_some()).await;
            let Some(Reply::Error(error)) = refused.last() else { panic!("{:?}", refused.last()) };
            assert_eq!(error.code, ErrorCode::QUARANTINED);
            assert!(error.retry_after_ms > 0 && error.message.contains("in 5 s"), "{error}");
        }
        let (token, took_ms) = first_grant(&service, leader, lease).await;
        assert_eq!(token, Token(5_001));
        let wait_ms = u64::from(WAIT_MS);
        assert!((wait_ms - 1_000..wait_ms + 1_000).contains(&took_ms), "{took_ms} ms");
        service.cluster.agree().await;
        for node in service.cluster.machines.keys() {
            assert_eq!(service.state(*node).quarantine_ms(), 0, "node {node}");
        }
    });
}

#[test]
fn each_new_leader_begins_the_wait_anew() {
    run(61, async {
        let service = Service::start_with(3, |_| {}, restored()).await;
        let (old, _) = service.cluster.leader().await;
        sleep_ms(u64::from(WAIT_MS) - 500).await;
        service.isolate(old);
        let (new, _) = service.cluster.leader_but(old).await;
        let lease = service.open_for(new, 60_000).await;
        let (token, took_ms) = first_grant(&service, new, lease).await;
        assert_eq!(token, Token(5_001));
        assert!(took_ms > u64::from(WAIT_MS) - 1_000, "granted after {took_ms} ms");
    });
}

fn ask_part(service: &Service, node: u64, ticket: u64, part: u32) -> Replies {
    let request = BackupRequest { shard: SHARD, ticket, part, timeout_ms: TIMEOUT_MS };
    service.ask(node, Request::Backup(request))
}

async fn part(service: &Service, node: u64, ticket: u64, part: u32) -> BackupReply {
    let replies = ask_part(service, node, ticket, part);
    match replies.reply("a part", |reply| matches!(reply, Reply::Backup(_))).await {
        Reply::Backup(reply) => reply,
        other => panic!("{other:?}"),
    }
}

async fn refusal(service: &Service, node: u64, ticket: u64, part: u32) -> ErrorCode {
    let replies = ask_part(service, node, ticket, part);
    until("a refusal", || replies.error().is_some()).await;
    replies.error().expect("just seen")
}

/// Opens sessions; 4,000 of them are more than one part. A label makes them longer.
async fn fill(service: &Service, leader: u64, batches: u32) {
    for _ in 0..batches {
        let opens: Vec<_> = (0..200)
            .map(|_| {
                let label = vec![b'x'; 100];
                service.command(leader, Command::Open { ttl_ms: 60_000, secret: SECRET, label })
            })
            .collect();
        until("all are open", || opens.iter().all(|open| open.last().is_some())).await;
    }
}

#[test]
fn a_backup_is_the_state_of_one_moment_whatever_comes_after() {
    run(62, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, _) = service.cluster.leader().await;
        let follower = leader % 3 + 1;
        fill(&service, leader, 20).await;
        let lease = service.open(leader).await;
        let grant = service.acquire(leader, lease, 1).await;
        let first = part(&service, follower, 0, 0).await;
        assert_eq!(first.about.last_token, grant.token);
        assert_eq!((first.about.leases, first.about.keys), (4_001, 1));
        service.outcome(leader, release(lease, 3, grant.token)).await;
        let mut decoder = Decoder::redacted();
        let parts = Cell::new(1);
        let mut reply = first.clone();
        loop {
            decoder.feed(&reply.bytes).expect("sound bytes");
            if reply.last {
                break;
            }
            let (ticket, next) = (reply.ticket, reply.part + 1);
            reply = part(&service, follower, ticket, next).await;
            assert_eq!(part(&service, leader, ticket, next).await, reply, "asked for again");
            assert_eq!(reply.about, first.about);
            parts.set(parts.get() + 1);
        }
        assert!(parts.get() > 2, "too small to show anything: {} parts", parts.get());
        let state = decoder.finish().expect("a whole state");
        assert_eq!(state.about(), first.about);
        assert!(state.key_info(KEY).holders[0].token == grant.token, "it was held then");
    });
}

#[test]
fn a_backup_that_is_not_read_ends_and_there_are_few_at_once() {
    run(63, async {
        let service = Service::start(1, |_| {}).await;
        let (leader, _) = service.cluster.leader().await;
        fill(&service, leader, 20).await;
        let first = part(&service, leader, 0, 0).await;
        assert!(!first.last, "read to its end at once");
        assert_eq!(refusal(&service, leader, 1, 1).await, ErrorCode::BACKUP_GONE);
        assert_eq!(refusal(&service, leader, first.ticket, 7).await, ErrorCode::BACKUP_GONE);
        let mut other = first.ticket;
        for _ in 1..4 {
            other = part(&service, leader, 0, 0).await.ticket;
            assert_ne!(other, first.ticket);
        }
        assert_eq!(refusal(&service, leader, 0, 0).await, ErrorCode::BUSY);

        // One that is read to its end gives way, but not before there is need.
        let (ticket, mut reply) = (first.ticket, first);
        while !reply.last {
            reply = part(&service, leader, ticket, reply.part + 1).await;
        }
        assert_eq!(part(&service, leader, ticket, reply.part).await, reply);
        assert_ne!(part(&service, leader, 0, 0).await.ticket, ticket);
        assert_eq!(refusal(&service, leader, ticket, reply.part).await, ErrorCode::BACKUP_GONE);
        assert_eq!(refusal(&service, leader, 0, 0).await, ErrorCode::BUSY);

        sleep_ms(31_000).await;
        assert_eq!(refusal(&service, leader, other, 1).await, ErrorCode::BACKUP_GONE);
        part(&service, leader, 0, 0).await;
    });
}

#[test]
fn a_leader_that_was_deposed_gives_out_no_backup() {
    run(64, async {
        let service = Service::start(3, |_| {}).await;
        let (old, _) = service.cluster.leader().await;
        service.isolate(old);
        let (new, _) = service.cluster.leader_but(old).await;
        service.open(new).await;
        assert!(service.cluster.group(old).leadership().is_some(), "INVALID: it knows already");
        assert_eq!(refusal(&service, old, 0, 0).await, ErrorCode::NO_QUORUM);
    });
}

#[test]
fn a_backup_holds_no_secret() {
    run(65, async {
        let service = Service::start(1, |_| {}).await;
        let lease = service.open(1).await;
        service.acquire(1, lease, 1).await;
        let reply = part(&service, 1, 0, 0).await;
        assert_eq!((reply.last, reply.about.leases), (true, 1), "INVALID: no lease is in it");
        assert!(!reply.bytes.windows(SECRET.0.len()).any(|bytes| bytes == SECRET.0));
    });
}
