import { Type } from 'typebox'
import { BORROWED_HEADER } from '../../src/http/borrowed-header.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { refusals, tornTensors, WeightsRefusal } from '../../src/http/schemas.ts'
import { entriesOf, TensorUpdateBody, toTensorUpdate } from '../../src/http/updates/tensor-body.ts'
import { labelText } from '../../src/http/updates/update-fields.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { takesForms } from '../../src/http/upload/form-parser.ts'
import { uploadType } from '../../src/http/upload/upload-types.ts'
import { updateFromUpload, UploadReport } from '../../src/http/upload/upload-update.ts'
import { updateFromTensors } from '../../src/updates/tensor-update.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const TensorsUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  torn_count: tornTensors,
  report: Report,
  upload: Type.Optional(UploadReport)
}, {
  title: 'TensorUpdateReply',
  description: 'All bytes are in place on every rank, and the sender may free or reuse its memory.'
})

/** Weights from the memory of processes on the same machine, and from uploads. */
const tensors: UpdateRoutes = async (app, { context }) => {
  updateRoute(app, context, '/update_weights_from_tensor', {
    config: { uploads: true },
    bodyLimit: TENSOR_BODY_LIMIT,
    // A body with an invalid field contains handles too; they are given back.
    refuse: async (body, error, headers) => {
      if (!(BORROWED_HEADER in headers)) await context.tensors.discard(entriesOf(body))
      return error
    },
    schema: {
      operationId: 'updateWeightsFromTensor',
      summary: 'Load new weights from tensors in the memory of a torch process',
      description:
        'All handles are read and checked before the first byte is written, and given back before any reply. ' +
        'A call equal to a running call gets the outcome of that call; but a call with `kept` writes again.',
      tags: ['weights'],
      body: TensorUpdateBody,
      response: { 200: TensorsUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    if (uploadType(request) !== undefined) {
      const { message, report, torn, upload } = await updateFromUpload(context, request)
      return { success: true as const, message, torn_count: torn, report: toReport(report), upload }
    }
    const { report, torn } = await updateFromTensors(context, {
      ...toTensorUpdate(request.body),
      borrowed: BORROWED_HEADER in request.headers
    })
    const message = `Success${labelText(request.body.weight_version, report)}`
    return { success: true as const, message, torn_count: torn, report: toReport(report) }
  })
}

export default takesForms(tensors)
