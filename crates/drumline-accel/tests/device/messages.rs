//! Messages between devices and hosts.

use std::sync::Arc;
use std::time::Duration;

use drumline_accel::{DeviceMessages, DeviceSlice};
use drumline_group::DType;
use drumline_group::ErrorKind;

use crate::common::{Data, Member, bench, config, finish};

fn messages(member: &Member) -> DeviceMessages {
    DeviceMessages::new(&member.group, Arc::new(member.device.clone())).unwrap()
}

#[test]
fn devices_and_hosts_send_to_each_other() {
    let bench = bench();
    let values = |rank: usize| vec![rank as f32 + 0.5; 3_000];
    bench.world(2, &config(), |member| {
        let stream = member.stream();
        if member.rank() == 0 {
            // Rank 0 alone has a device: nobody else takes part in that.
            let on = messages(&member);
            let [own, got] = [values(0), values(9)].map(|it| Data::new(&member.device, &it));
            [&own, &got].iter().for_each(|it| it.put(&*stream));
            let sent = on.send_on(&stream, own.slice(), 1, 7).unwrap();
            let received = on.recv_on(&stream, got.slice(), 1, 8).unwrap();
            received.join(&stream).unwrap();
            got.fetch(&*stream);
            finish(&stream);
            sent.wait().unwrap();
            assert!(got.found() == values(1));
            assert_eq!(received.source(), None);
        } else {
            let mut got = values(9);
            member.group.recv(&mut got, 0, 7).unwrap();
            assert!(got == values(0));
            member.group.send(&values(1), 0, 8).unwrap();
        }
        member.group.barrier().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_message_from_any_rank_says_who_has_sent_it() {
    let bench = bench();
    bench.world(3, &config(), |member| {
        let (on, stream) = (messages(&member), member.stream());
        let data = Data::new(&member.device, &[member.rank() as u32; 100]);
        data.put(&*stream);
        if member.rank() > 0 {
            on.send_on(&stream, data.slice(), 0, 3).unwrap().wait().unwrap();
        } else {
            let mut seen = Vec::new();
            for _ in 1..3 {
                let work = on.recv_any_on(&stream, data.slice(), 3).unwrap();
                work.join(&stream).unwrap();
                data.fetch(&*stream);
                finish(&stream);
                let source = work.source().unwrap();
                assert!(data.found() == [source as u32; 100]);
                seen.push(source);
            }
            seen.sort_unstable();
            assert_eq!(seen, [1, 2]);
        }
        member.group.barrier().unwrap();
    });
    bench.is_clean();
}

#[test]
fn messages_from_one_device_keep_their_order() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let (on, stream) = (messages(&member), member.stream());
        let all: Vec<Data<u32>> =
            (0..20).map(|at| Data::new(&member.device, &[at, member.rank() as u32])).collect();
        for data in &all {
            data.put(&*stream);
            let work = match member.rank() {
                0 => on.send_on(&stream, data.slice(), 1, 0),
                _ => on.recv_on(&stream, data.slice(), 0, 0),
            };
            work.unwrap().join(&stream).unwrap();
            data.fetch(&*stream);
        }
        finish(&stream);
        for (at, data) in all.iter().enumerate() {
            assert_eq!(data.found(), [at as u32, 0]);
        }
        member.group.barrier().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_message_of_another_length_poisons_the_group_as_on_hosts() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let (on, stream) = (messages(&member), member.stream());
        let data = Data::new(&member.device, &vec![0_f32; 10 + member.rank()]);
        data.put(&*stream);
        let work = match member.rank() {
            0 => on.send_on(&stream, data.slice(), 1, 0),
            _ => on.recv_on(&stream, data.slice(), 0, 0),
        };
        let error = work.unwrap().wait().unwrap_err();
        assert!(error.cause().is_some(), "{error}");
        assert!(error.to_string().contains("10"), "{error}");
        assert!(member.group.barrier().is_err());
        let none = DeviceSlice::empty(DType::F32);
        assert!(matches!(on.send_on(&stream, none, 0, 0), Err(error) if error.kind() == ErrorKind::Poisoned));
    });
    bench.gives_back();
}

#[test]
fn a_receive_that_nobody_answers_ends_with_its_group() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let (on, stream) = (messages(&member), member.stream());
        let data = Data::new(&member.device, &[0_f32; 10]);
        data.put(&*stream);
        let work = on.recv_any_on(&stream, data.slice(), 0).unwrap();
        drop(on);
        member.group.barrier().unwrap();
        assert!(!work.is_done());
        // That ends what was not received, with an error on one rank or on both.
        let _ = member.group.leave(Duration::from_secs(1));
        assert!(work.wait().is_err());
    });
    bench.gives_back();
}
