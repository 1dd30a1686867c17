//! Nodes that are far from each other: the answer to a heartbeat comes when the next ones have long
//! been sent, and a round is confirmed all the same (G7, G8).

use super::*;

#[test]
fn a_round_trip_longer_than_a_heartbeat_confirms_rounds_of_an_idle_shard() {
    run(1, async {
        let service = Service::start(3, |_| {}).await;
        let (leader, leadership) = service.cluster.leader().await;
        let lease = service.open_for(leader, 60_000).await;
        let heartbeat = service.cluster.group(leader).timings().heartbeat;
        // Each way, so that no answer comes within the interval.
        let far = heartbeat * 3 / 4;
        let domains: Vec<_> = service.cluster.machines.values().map(|it| it.domain).collect();
        for from in &domains {
            for to in domains.iter().filter(|to| *to != from) {
                service.cluster.net.set_delay(*from, *to, far, far);
            }
        }
        sleep_ms(1_000).await;
        for _ in 0..5 {
            let (read, renewal) = (service.get(leader), service.renew(leader, lease));
            read.reply("a read", |reply| matches!(reply, Reply::Keys(_))).await;
            until("the renewal is answered", || renewal.renewal().is_some()).await;
            assert_eq!(renewal.renewal(), Some(Ok(())));
            sleep_ms(200).await;
        }
        assert_eq!(service.cluster.leader().await, (leader, leadership), "INVALID: it changed");
    });
}
