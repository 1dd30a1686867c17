//! A batch's bytes: round trip, and every kind of damage.

use leasehold_core::{BATCH_VERSION, Batch, BatchWriter, DecodeError};
use leasehold_protocol::command::{Caller, Command, OwnLease, Want};
use leasehold_protocol::ids::{LeaseId, Mode, Number, Secret, Token};

fn caller() -> Caller {
    Caller {
        lease: LeaseId(7),
        secret: Secret([9; 16]),
        number: Number(4),
        floor: Number(3),
        acks: vec![Number(1), Number(2)],
    }
}

/// One of each.
fn commands() -> Vec<Command> {
    let (lease, secret, token) = (LeaseId(7), Secret([9; 16]), Token(1 << 50));
    let key = || b"jobs/nightly".to_vec();
    vec![
        Command::Open { ttl_ms: 5_000, secret, label: b"web".to_vec() },
        Command::Acquire {
            caller: caller(),
            key: key(),
            mode: Mode::EXCLUSIVE,
            own: Some(OwnLease { ttl_ms: 1_000, secret }),
            value: vec![1; 4_096],
            wait_ms: u32::MAX,
        },
        Command::Cancel { caller: caller(), release_if_granted: true },
        Command::Release { caller: caller(), key: key(), token },
        Command::ReleaseOwn { lease, secret, key: key(), token },
        Command::Close { lease, secret },
        Command::ForceRelease {
            key: key(),
            token,
            who: b"ops".to_vec(),
            why: b"stuck".to_vec(),
            now: false,
        },
        Command::Begin { token_base: token },
        Command::Expire { lease },
        Command::EndForced { key: key(), token },
        Command::TimeOut { lease, number: Number(4) },
        Command::AcquireAll {
            caller: caller(),
            wants: vec![Want { key: key(), mode: Mode::permits(2), limit: 5, reentrant: true }],
            own: None,
            value: vec![1; 4_096],
            wait_ms: 5,
            delay_ms: 60_000,
        },
        Command::SetValue { caller: caller(), key: key(), token, value: vec![1; 4_096] },
        Command::AskYield {
            key: key(),
            token,
            who: b"ops".to_vec(),
            why: b"drain".to_vec(),
            within_ms: 60_000,
        },
        Command::SetLimit { key: key(), limit: 7, who: b"ops".to_vec() },
        Command::EndDelay { key: key(), token },
        Command::Convert { caller: caller(), key: key(), token, mode: Mode::SHARED },
    ]
}

#[test]
fn comes_back_as_it_went() {
    let batch = Batch { wall_ms: 1_700_000_000_000, commands: commands() };
    let bytes = batch.encode();
    assert_eq!(bytes[0], BATCH_VERSION);
    assert_eq!(Batch::decode(&bytes), Ok(batch.clone()));
    let empty = Batch { wall_ms: 0, commands: Vec::new() };
    assert_eq!(Batch::decode(&empty.encode()), Ok(empty));

    let mut writer = BatchWriter::new(batch.wall_ms);
    assert!(writer.is_empty());
    for command in &batch.commands {
        let before = writer.byte_len();
        writer.push(command);
        assert!(writer.byte_len() > before);
    }
    assert_eq!(writer.len(), batch.commands.len());
    assert_eq!(writer.byte_len(), bytes.len());
    assert_eq!(writer.finish(), bytes);
}

#[test]
fn another_version_is_named_whatever_follows() {
    assert_eq!(Batch::decode(&[9]), Err(DecodeError::Version(9)));
    assert_eq!(Batch::decode(&[]), Err(DecodeError::Length));
}

#[test]
fn every_cut_and_every_addition_is_found() {
    let bytes = Batch { wall_ms: 5, commands: commands() }.encode();
    for len in 0..bytes.len() {
        assert_eq!(Batch::decode(&bytes[..len]), Err(DecodeError::Length), "{len} bytes");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(Batch::decode(&longer), Err(DecodeError::Length));
}

/// Counts and lengths that the bytes do not back are refused, without memory for them.
#[test]
fn claims_without_bytes_are_refused() {
    let mut bytes = Batch { wall_ms: 5, commands: commands() }.encode();
    bytes[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Batch::decode(&bytes), Err(DecodeError::Length));
    let mut bytes = Batch { wall_ms: 5, commands: commands() }.encode();
    bytes[13..17].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Batch::decode(&bytes), Err(DecodeError::Length));
}

/// The log has checksums of its own; here a changed byte must only never panic.
#[test]
fn a_changed_byte_gives_an_error_or_another_batch() {
    let bytes = Batch { wall_ms: 5, commands: commands() }.encode();
    let mut malformed = 0;
    for position in 0..bytes.len() {
        for value in [0x00, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[position] = value;
            if let Err(DecodeError::Malformed(_)) = Batch::decode(&damaged) {
                malformed += 1;
            }
        }
    }
    assert!(malformed > 100, "only {malformed} were found malformed");
}
