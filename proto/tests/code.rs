//! Error codes survive the way over gRPC, and foreign statuses get the nearest code.

use thalweg_proto::code::ErrorCode;

#[test]
fn every_code_survives_grpc() {
    for code in ErrorCode::ALL {
        assert_eq!(ErrorCode::of(&code.status("because")), code);
    }
}

#[test]
fn a_status_of_another_server_gets_the_nearest_code() {
    for (grpc, expected) in [
        (tonic::Code::Unavailable, ErrorCode::Unavailable),
        (tonic::Code::ResourceExhausted, ErrorCode::Overloaded),
        (tonic::Code::InvalidArgument, ErrorCode::InvalidRequest),
        (tonic::Code::Unknown, ErrorCode::Internal),
    ] {
        assert_eq!(ErrorCode::of(&tonic::Status::new(grpc, "")), expected);
    }
}

#[test]
fn openai_types_follow_the_status() {
    for (code, status, kind) in [
        (ErrorCode::InvalidRequest, 400, "invalid_request_error"),
        (ErrorCode::ModelNotFound, 404, "invalid_request_error"),
        (ErrorCode::Overloaded, 429, "rate_limit_error"),
        (ErrorCode::Unavailable, 503, "service_unavailable_error"),
        (ErrorCode::Internal, 500, "server_error"),
    ] {
        assert_eq!((code.http().as_u16(), code.openai_type()), (status, kind));
    }
}
