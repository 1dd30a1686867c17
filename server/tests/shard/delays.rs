//! Lock-delays across a change of leader: each lasts once more in full, and ends (G3).

use leasehold_protocol::command::Want;

use super::*;

const DELAY_MS: u32 = 3_000;

fn acquire_with_delay(lease: LeaseId) -> Command {
    let want = Want { key: KEY.to_vec(), mode: Mode::EXCLUSIVE, limit: 0, reentrant: false };
    Command::AcquireAll {
        caller: caller(lease, 1),
        wants: vec![want],
        own: None,
        value: vec![],
        wait_ms: 0,
        delay_ms: DELAY_MS,
    }
}

fn is_delayed(service: &Service, node: u64, token: Token) -> bool {
    service.state(node).is_delayed(token)
}

#[test]
fn a_delay_lasts_once_more_under_a_new_leader() {
    run(80, async {
        let service = Service::start(3, |_| {}).await;
        let (old, _) = service.cluster.leader().await;
        let lease = service.open(old).await;
        let token = match service.outcome(old, acquire_with_delay(lease)).await {
            Outcome::Granted(grant) => grant.token,
            other => panic!("{other:?}"),
        };
        let everywhere = || service.shards.keys().all(|node| is_delayed(&service, *node, token));
        until("its lease ends, the delay begins", everywhere).await;
        sleep_ms(u64::from(DELAY_MS) / 2).await;
        service.isolate(old);
        let (new, _) = service.cluster.leader_but(old).await;
        let began = SimClock.now();
        assert!(is_delayed(&service, new, token), "INVALID: it is over before the take-over");
        until("it ends", || !is_delayed(&service, new, token)).await;
        let lasted = SimClock.now().since(began).as_millis();
        let full = u128::from(DELAY_MS);
        assert!((full - 50..full + 500).contains(&lasted), "{lasted} ms under the new leader");
    });
}
